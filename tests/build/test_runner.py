"""Laws of the runner: one model after the other, what is done is left, a failure stops what needs it."""

from __future__ import annotations

import pytest

from ortprep.build.runner import run_builds, with_requirements
from tests.build.fakes import Count, Shout, tasks
from tests.prepare.builders import AS_PREPARED, SHAPES, Project, folding_net


class Recorder:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, event):
        if event.kind == "said":
            self.told.append(f"{event.task} said {event.text}")
        else:
            self.told.append(f"{event.kind} {event.task}{event.text and ': '}{event.text}".rstrip())

    def finished_tasks(self) -> list[str]:
        return [line.removeprefix("finished ") for line in self.told if line.startswith("finished ")]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))


def test_a_second_run_does_nothing_and_says_so(tmp_path):
    first, second = Recorder(), Recorder()
    assert run_builds((tasks(tmp_path, Shout(), Count()),), first) == ()
    assert run_builds((tasks(tmp_path, Shout(), Count()),), second) == ()
    assert first.told == [
        "started shout:m",
        "shout:m said shouting hello",
        "finished shout:m",
        "started count:m/cpu",
        "finished count:m/cpu",
        "ended",
    ]
    assert second.told == ["current shout:m", "current count:m/cpu", "ended"]


def test_a_failed_model_holds_up_no_other(tmp_path):
    recorder = Recorder()
    builds = (
        tasks(tmp_path, Shout(fails=True), Count(), name="bad"),
        tasks(tmp_path, Shout(), Count(), name="good"),
        tasks(tmp_path, Shout(), Count(), name="better"),
    )
    (error,) = run_builds(builds, recorder)
    assert error.message.startswith("shout of bad: lost its voice")
    assert error.hint == "drink tea"
    assert "skipped count:bad/cpu: shout:bad failed" in recorder.told
    # One model after the other: the first bundle is there before work on the next one begins.
    assert recorder.finished_tasks() == ["shout:good", "count:good/cpu", "shout:better", "count:better/cpu"]


def test_a_run_that_is_not_to_go_on_stops_at_the_first_failure(tmp_path):
    recorder = Recorder()
    builds = (
        tasks(tmp_path, Shout(fails=True), Count(), name="bad"),
        tasks(tmp_path, Shout(), Count(), name="good"),
    )
    assert len(run_builds(builds, recorder, keep_going=False)) == 1
    assert recorder.told[-4:] == [
        "skipped count:bad/cpu: shout:bad failed",
        "skipped shout:good: shout:bad failed",
        "skipped count:good/cpu: shout:bad failed",
        "ended",
    ]


def test_what_a_task_needs_is_all_that_runs_with_it(tmp_path):
    shout, count = tasks(tmp_path, Shout(), Count())
    assert with_requirements((shout, count), [count]) == (shout, count)
    assert with_requirements((shout, count), [shout]) == (shout,)


@pytest.mark.slow
def test_a_bundle_is_there_before_doit_begins_with_the_next_model(tmp_path):
    project = Project(tmp_path / "project")
    for name in ("first", "second"):
        project.add(folding_net(), name, inputs=SHAPES, tune=AS_PREPARED)
    outcome = project.doit("prepare")
    order = [line.split()[1] for line in outcome.err.splitlines() if line.startswith("done ")]
    assert [task.partition(":")[2].partition("/")[0] for task in order] == ["first"] * 7 + ["second"] * 7
    assert order[6::7] == ["package:first", "package:second"]
