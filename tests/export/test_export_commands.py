"""`ortprep export`: what it writes to stdout, and what becomes of mistakes."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner, Result

from ortprep.cli import serving_commands  # noqa: F401  puts the commands on the app
from ortprep.cli.command import app
from ortprep.versions import install_command
from tests.export.fakes import warm_up
from tests.runtime.builders import UNMET, write_bundle
from tests.runtime.pool.builders import write_doubling


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture
def bundles(tmp_path):
    return write_bundle(tmp_path / "linear"), write_doubling(tmp_path / "double")


def test_triton_writes_a_model_per_bundle_and_lists_them(bundles, tmp_path):
    ended = call("triton", *bundles, "--out", tmp_path / "repository")
    assert ended.exit_code == 0
    assert "linear: variant cpu of linear" in ended.stdout
    assert "optimization.graph.level=2" in ended.stdout
    assert [warm_up(tmp_path / "repository" / name) for name in ("linear", "double")]


def test_json_is_all_there_is_on_stdout(bundles, tmp_path):
    ended = call("triton", bundles[0], "--out", tmp_path / "repository", "--json", "--max-batch-size", "4")
    exported = json.loads(ended.stdout)
    assert exported["models"][0]["left_out"] == {}
    assert exported["passed_over"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--variant", "gpu"), 1, "no such variant"),
        (("--onnxruntime", "new"), 2, "expected a version"),
        (("--precision", "fp7"), 4, "precision"),
        (("--name", "a/b"), 1, "not a name"),
        (("--target", "cuda"), 1, "expected target cuda"),
        (("--onnxruntime", "1.20"), 1, "expected ONNX Runtime >= 1.23"),
    ],
)
def test_a_mistake_is_told_and_writes_nothing(bundles, tmp_path, arguments, code, expected):
    ended = call("triton", bundles[0], "--out", tmp_path / "repository", *arguments)
    assert (ended.exit_code, ended.stdout) == (code, "")
    assert expected in ended.stderr
    assert not (tmp_path / "repository").exists()


def test_a_name_for_two_bundles_is_refused(bundles, tmp_path):
    ended = call("triton", *bundles, "--out", tmp_path / "repository", "--name", "one")
    assert ended.exit_code == 2


def test_the_hint_for_a_bundle_that_fits_nowhere_names_the_options(tmp_path):
    bundle = write_bundle(tmp_path / "linear", requirements={"cpu": UNMET})
    ended = call("triton", bundle, "--out", tmp_path / "repository", "--onnxruntime", "1.28.0")
    assert ended.exit_code == 1
    assert "--here" in ended.stderr


def test_without_triton_s_messages_the_extra_is_named(bundles, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tritonclient.grpc.model_config_pb2", None)
    ended = call("triton", bundles[0], "--out", tmp_path / "repository")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert install_command("triton") in ended.stderr
    assert not (tmp_path / "repository").exists()
