"""From a spec with a search to a bundle: everything is real but the figures."""

import json
from unittest.mock import patch

import numpy as np
import pytest

from ortprep.bundle.manifest import read_manifest
from ortprep.children.probe import ProbeResult
from ortprep.runtime import load, wait_steady
from tests.builders import conv_net
from tests.prepare.builders import Project, answers, source_answers

pytestmark = pytest.mark.slow

SHAPES = {"image": {"shapes": [[1, 3, 16, 16], [2, 3, 16, 16]]}}
TUNE = {"max_trials": 6, "budget_s": 900, "rounds": 3, "steady_s": 0.01}
FEEDS = {"image": np.random.default_rng(3).random((2, 3, 16, 16), np.float32)}


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path / "project")
    project.add(conv_net(channels=32, classes=300), inputs=SHAPES, tune=TUNE)
    return project


def tuning(project):
    return read_manifest(project.bundle()).variants[0].tuning


def fake_measure(request, **_):
    """Stands for `measure_plan`: what is prepared less loads sooner and runs longer, the source apart."""
    options = request.plan.session_options
    is_source = options.graph_optimization_level == "ORT_ENABLE_ALL"
    init_ms, steady_ms = (1000.0 if is_source else 100.0), 1.0
    if options.config_entries.get("session.disable_prepacking") == "1":
        init_ms, steady_ms = 0.5 * init_ms, 2 * steady_ms
    return ProbeResult(
        ready_ms=init_ms + 42.0,
        init_ms=init_ms,
        first_ms=2.0,
        steady_ms=steady_ms,
        runs=5,
        private_mb=50.0,
        peak_mb=100.0,
        gpu_mb=None,
        more_steady_ms=(steady_ms,) * len(request.more_samples),
    )


def prepare_with_given_figures(project):
    """Runs `ortprep prepare` with all but the measuring real."""
    with (
        patch("ortprep.tuning.trial.measure_plan", fake_measure),
        patch("ortprep.stages.measure.stage.measure_plan", fake_measure),
    ):
        return project.call("prepare")


def test_two_phases_share_the_files_of_the_second_one_where_they_can(project):
    assert prepare_with_given_figures(project).code == 0
    record = tuning(project)
    assert record.first_phase is not None
    config = json.loads((project.bundle() / "loader.json").read_text())["variants"][0]
    assert record.trials[record.first_phase].choice["prepacking"] == "off"
    assert config["first_phase"]["session_options"]["config_entries"]["session.disable_prepacking"] == "1"
    assert {path.name for path in (project.bundle() / "cpu").iterdir()} == {
        "net_optimized.onnx",
        "net_optimized.onnx.data",
    }
    assert project.run("check", "artifacts/net").code == 0
    session = load(project.bundle(), check="golden")
    early = answers(session, FEEDS)["scores"]
    wait_steady(session, 600)
    expected = source_answers(project.models / "net.onnx", FEEDS)["scores"]
    for got in (early, answers(session, FEEDS)["scores"]):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
