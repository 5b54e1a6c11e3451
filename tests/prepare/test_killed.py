"""A build killed at any stage: the old bundle or the new one stands, and the next run ends the work."""

import signal
import subprocess

import numpy as np
import pytest

from ortprep.runtime import load
from tests.builders import write_model
from tests.prepare.builders import (
    STAGES,
    answers,
    done,
    folding_net,
    is_intact,
    kill,
    new_project,
    pause_in,
    source_answers,
    stamps,
)


@pytest.mark.slow
def test_a_build_killed_in_every_stage_leaves_the_old_bundle_until_the_new_one_is_whole(built):
    old = stamps(built.bundle())
    feeds = {"x": np.ones((1, 64), np.float32)}
    before = answers(load(built.bundle()), feeds)["y"]
    source = write_model(folding_net(seed=1), built.models / "net.onnx")

    for stage in STAGES:
        outcome = kill(pause_in(built, stage))
        assert outcome.code == -signal.SIGKILL
        assert stamps(built.bundle()) == old
        assert is_intact(built.bundle())
        assert np.array_equal(answers(load(built.bundle(), digests="full"), feeds)["y"], before)
    assert built.run("check", "artifacts/net").code == 0

    assert done(built.run("prepare")) == {"package:net"}
    assert built.leftovers() == []
    assert built.run("check", "artifacts/net").code == 0
    expected = source_answers(source, feeds)["y"]
    np.testing.assert_allclose(answers(load(built.bundle()), feeds)["y"], expected, rtol=1e-3, atol=1e-5)
    assert built.explain() == {}


@pytest.mark.manual
@pytest.mark.parametrize(
    ("options", "with_doit"),
    [((), False), ((), True), (("-n", "2"), True)],
    ids=["ortprep", "doit", "doit, in parallel"],
)
def test_an_interrupted_build_says_so_and_goes_on_later(project, options, with_doit):
    process = pause_in(project, "optimize", *options, with_doit=with_doit)
    outcome = kill(process, with_signal=signal.SIGINT)
    assert (outcome.code, outcome.out) == (130, ""), outcome.err
    assert "interrupted" in outcome.err
    assert "Traceback" not in outcome.err
    assert "FAILED" not in outcome.err
    assert not project.bundle().exists()
    assert "fetch:net" not in done(project.doit("optimize"))
    assert project.leftovers() == []


@pytest.mark.slow
def test_a_terminated_build_leaves_no_child(project):
    outcome = kill(pause_in(project, "optimize"), with_signal=signal.SIGTERM)
    assert outcome.code == 128 + signal.SIGTERM
    assert not project.bundle().exists()


@pytest.mark.manual
def test_a_build_killed_at_any_instant_is_ended_by_the_next_run(tmp_path):
    """Kills after 0.2 s, 0.4 s, …, wherever that is, until a build gets through."""
    project = new_project(tmp_path / "project")
    for fifths in range(1, 200):
        process = project.start("-m", "ortprep", "prepare")
        try:
            process.wait(timeout=fifths / 5)
        except subprocess.TimeoutExpired:
            kill(process)
            assert not project.bundle().exists() or is_intact(project.bundle())
            continue
        process.communicate()
        assert process.returncode == 0
        break
    assert project.run("check", "artifacts/net").code == 0
    assert project.leftovers() == []
    assert project.explain() == {}
