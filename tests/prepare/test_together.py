"""Builds and jobs at the same time, in processes of their own."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.builders import write_model
from tests.fakes import wait_for
from tests.prepare.builders import (
    SHAPES,
    all_tasks,
    done,
    finish,
    folding_net,
    is_intact,
    kill,
    pause_in,
)

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
def test_a_job_never_sees_an_error_while_its_bundle_is_put_together_again_and_again(built):
    builds = 5
    with job_loading(built) as job:
        for timeout_s in range(100, 100 + builds):
            # Changes the record of the spec and nothing that was built from it.
            built.write_spec(inputs=SHAPES, optimize={"timeout_s": timeout_s})
            assert done(built.run("prepare")) == {"package:net"}
            job.wait_for_a_load()
    assert job.loads > builds
    assert job.answers == 1


@pytest.mark.manual
def test_a_job_gets_the_old_answers_or_the_new_ones_while_the_model_changes(built):
    with job_loading(built) as job:
        for seed in (1, 2, 3, 4):
            write_model(folding_net(seed=seed), built.models / "net.onnx")
            assert done(built.run("prepare")) == all_tasks()
            job.wait_for_a_load()
    assert job.answers == 5


def count_said(outcomes, line):
    return sum(outcome.err.count(line) for outcome in outcomes)


@pytest.mark.manual
def test_of_two_builds_at_once_each_task_is_done_by_one(project):
    processes = [project.start("-m", "ortprep", "prepare") for _ in range(2)]
    outcomes = finish(processes[0]), finish(processes[1])
    assert [outcome.code for outcome in outcomes] == [0, 0]
    assert done(outcomes[0]) | done(outcomes[1]) == all_tasks()
    # What a stage says while it works shows who worked.
    assert count_said(outcomes, "fetch:net: fetching") == 1
    for variant in ("cpu", "portable"):
        assert count_said(outcomes, f"verify:net/{variant}: source on CPU") == 1
    assert is_intact(project.bundle())
    assert project.leftovers() == []
    assert project.explain() == {}


@pytest.mark.slow
def test_a_build_goes_on_where_one_that_held_the_lock_was_killed(project):
    first = pause_in(project, "optimize")
    second = project.start("-m", "doit", *doit_arguments(project), "optimize")
    kill(first)
    assert "optimize:net/cpu" in done(finish(second))
    assert project.leftovers() == []


def doit_arguments(project):
    dodo = Path(__file__).resolve().parents[2] / "dodo.py"
    return ("-f", str(dodo), f"configs={project.configs}", f"artifacts={project.artifacts}")
