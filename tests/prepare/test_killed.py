"""A build killed at any stage: the old bundle or the new one stands, and the next run ends the work."""

from __future__ import annotations

import signal
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ortprep.runtime import load
from tests.builders import write_model
from tests.fakes import wait_for
from tests.prepare.builders import (
    STAGES,
    all_tasks,
    answers,
    done,
    finish,
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
    assert outcome.code == -signal.SIGTERM
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


# -- builds and jobs at the same time, in processes of their own

JOB = """
import sys, time
import numpy as np
from ortprep.runtime import load

bundle, stop, count = sys.argv[1:]
feeds = {"x": np.ones((2, 64), np.float32)}
loads, seen = 0, set()
while True:
    answer = load(bundle, digests=("changed", "full")[loads % 2]).run(["y"], feeds)[0]
    seen.add(answer.tobytes())
    loads += 1
    with open(count, "ab") as file:
        file.write(b".")
    if loads == 1:
        print("started", flush=True)
    try:
        open(stop).close()
    except FileNotFoundError:
        time.sleep(0.01)  # leaves the builds some of the machine
        continue
    break
print(loads, len(seen), flush=True)
"""
"""A job that loads a bundle again and again until it is told to stop; any error ends it."""


@dataclass
class Job:
    """The job while it runs; afterwards how often it loaded and how many different answers it got."""

    process: subprocess.Popen[str]
    count: Path
    loads: int = 0
    answers: int = 0

    def wait_for_a_load(self):
        """Waits until it made a load that began after now, or ended: builds could overtake a slow one."""
        before = self.count.stat().st_size
        wait_for(
            lambda: self.count.stat().st_size >= before + 2 or self.process.poll() is not None,
            what="the job loads again",
        )


@contextmanager
def job_loading(project):
    """Runs the job while the block runs."""
    stop, count = project.root / "stop", project.root / "count"
    process = project.start("-c", JOB, str(project.bundle()), str(stop), str(count))
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n", finish(process).err
    job = Job(process, count)
    try:
        yield job
    finally:
        stop.touch()
        outcome = finish(process)
    assert (outcome.code, outcome.err) == (0, "")
    job.loads, job.answers = map(int, outcome.out.split())


@pytest.mark.manual
def test_a_job_gets_the_old_answers_or_the_new_ones_while_the_model_changes(built):
    with job_loading(built) as job:
        for seed in (1, 2, 3, 4):
            write_model(folding_net(seed=seed), built.models / "net.onnx")
            assert done(built.run("prepare")) == all_tasks()
            job.wait_for_a_load()
    assert job.answers == 5
