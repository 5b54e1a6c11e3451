"""What the names on a command line stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ortprep.bundle.manifest import read_manifest, write_manifest
from ortprep.cli.model_resolution import Locations, examine_prepared
from tests.builders import matmul_net, write_external_model
from tests.prepare.builders import Project
from tests.runtime.builders import entry, write_bundle


def test_a_source_with_other_weights_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    project = Project(tmp_path)
    project.write_spec("linear", inputs={"x": {"shapes": [[1, 64]]}})
    write_external_model(matmul_net(), project.models / "linear.onnx")
    model, weights = (entry(project.models, name) for name in ("linear.onnx", "weights.bin"))
    bundle = write_bundle(project.bundle("linear"))
    manifest = read_manifest(bundle)
    other = replace(weights, sha256="sha256:" + "0" * 64)
    source = replace(manifest.source, sha256=model.sha256, files=(model, other))
    write_manifest(bundle, replace(manifest, source=source))
    (tmp_path / "inputs").mkdir()
    found = examine_prepared("linear", Locations(tmp_path / "inputs", project.configs, project.artifacts))
    assert found.source is None
    assert found.remarks == (
        "its source is not compared: it is not the one that the bundle was prepared from",
    )
