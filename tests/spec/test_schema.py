"""Laws of the JSON Schema, and of the specs that are shipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import onnx.backend.test
import pytest
import yaml

from ortprep.errors import SpecError
from ortprep.spec.fleet import DEFAULT_FLEET, read_fleet
from ortprep.spec.models import spec_schema
from ortprep.spec.reading import read_spec, read_specs
from tests.spec.test_models import FULL

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = ("densenet121", "resnet50", "squeezenet")
"""By name: a checkout's folder also has the specs that its user wrote."""

LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"


def schemas(schema: Any) -> Iterator[Any]:
    """Yields every property's schema with its name."""
    for value in schema.get("$defs", {}).values():
        yield from schemas(value)
    yield from schema.get("properties", {}).items()


def test_every_key_is_described_for_the_editor():
    for name, schema in schemas(spec_schema()):
        assert schema.get("description") or "$ref" in schema, name


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_spec_validates_against_the_schema(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=../docs/spec.schema.json\n")
    jsonschema.Draft202012Validator(spec_schema()).validate(yaml.safe_load(text))


def test_what_the_schema_takes_and_refuses_is_what_the_reader_does():
    validator = jsonschema.Draft202012Validator(spec_schema())
    assert validator.is_valid(FULL)
    wrong: list[dict[str, Any]] = [
        FULL | {"name": "a/b"},
        FULL | {"source": {"path": "a", "demo": "b"}},
        FULL | {"targets": ["tpu"]},
        FULL | {"verify": {"rtl": 1}},
        {"name": "x"},
    ]
    assert not any(validator.is_valid(data) for data in wrong)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_specs_are_named_as_their_files_and_name_the_inputs_of_their_models(name):
    spec = read_spec(CONFIGS / f"{name}.yaml")
    assert spec.name == name
    graph = onnx.load(LIGHT / f"light_{spec.source.demo}.onnx").graph
    weights = {tensor.name for tensor in graph.initializer}
    shapes = {
        value.name: tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in graph.input
        if value.name not in weights
    }
    assert {name: given.shapes[0] for name, given in spec.inputs.items()} == shapes


# -- laws of `fleet.yaml`: every problem told with its line, and no spec of a model


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
