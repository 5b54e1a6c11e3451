"""Laws of `fleet.yaml`: every problem told with its line, and no spec of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortprep.errors import SpecError
from ortprep.spec.fleet import DEFAULT_FLEET, read_fleet
from ortprep.spec.reading import read_specs


def write(folder: Path, text: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return path


def test_kinds_are_read_in_order_with_labels_and_resources(tmp_path):
    write(
        tmp_path,
        """
hardware:
  h100: {target: cuda, labels: {ray.io/accelerator-type: "in(H100, H200)"}, resources: {quiet: 1}}
  cpu-avx512: {target: cpu, labels: {ortprep.io/avx512f: "true"}}
""",
    )
    fleet = read_fleet(None, configs=tmp_path)
    assert list(fleet.hardware) == ["h100", "cpu-avx512"]
    assert fleet.hardware["h100"].labels == {"ray.io/accelerator-type": "in(H100, H200)"}
    assert fleet.hardware["h100"].resources == {"quiet": 1}


def test_without_a_file_there_is_a_kind_for_each_target(tmp_path):
    assert read_fleet(None, configs=tmp_path) == DEFAULT_FLEET
    assert {kind.target for kind in DEFAULT_FLEET.hardware.values()} == {"cpu", "cuda"}


def test_a_file_that_is_named_has_to_be_there(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        read_fleet(tmp_path / "other.yaml", configs=tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hardware: {}", r"fleet\.yaml:1: hardware: "),
        ("{}", r"hardware: missing"),
        ("hardware:\n  a: {target: tpu}", r":2: hardware\.a\.target: .*'cpu' or 'cuda', got 'tpu'"),
        ("hardware:\n  a: {labels: {}}", r":2: hardware\.a\.target: missing"),
        ("hardware:\n  ../a: {target: cpu}", r":2: hardware\.'\.\./a': expected up to 128 letters"),
        ("hardware:\n  a: {target: cpu, lables: {}}", r":2: hardware\.a\.lables: unknown key"),
        (
            "hardware:\n  a:\n    target: cpu\n    labels: {x: a b}",
            r":4: .*x: expected .*VALUE",
        ),
        ("hardware:\n  a: {target: cpu, labels: {x y: a}}", r"'x y': expected a label's key"),
        ("hardware:\n  a: {target: cpu, labels: {x: true}}", r"hardware\.a\.labels\.x: .*got true"),
        ("hardware:\n  a: {target: cpu, resources: {quiet: 0}}", r"hardware\.a\.resources\.quiet: .*got 0"),
        ("hardware:\n  a: {target: cpu}\n  a: {target: cpu}", r":3: "),
        ("hardware:\n  a: {target: cpu, resources: {CPU: 2}}", r"resources: .*CPU is reserved by target"),
        ("hardware:\n  a: {target: cpu, labels: {x: 'in( a )'}}", r"expected .*VALUE, !VALUE, in\(A, B\)"),
        ("hardware:\n  cuda: {target: cpu}", r"expected another name: 'cuda' is reserved"),
        ("- 1", r"fleet\.yaml"),
    ],
)
def test_what_is_wrong_is_told_where_it_stands(tmp_path, text, problem):
    path = write(tmp_path, text)
    with pytest.raises(SpecError, match=problem):
        read_fleet(path, configs=tmp_path)


def test_it_is_no_spec_of_a_model(tmp_path):
    write(tmp_path, "hardware: {a: {target: cpu}}")
    (tmp_path / "net.yaml").write_text("name: net\nsource: {demo: squeezenet}\n")
    assert [spec.name for spec in read_specs(tmp_path)] == ["net"]
