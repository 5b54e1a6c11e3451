"""Laws of running tasks: a second run does nothing, a change is found and named, nothing half-done counts."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from ortprep.build.execution import remove_intermediates, remove_outcome, run_task, why_stale
from ortprep.build.explanations import explain_tasks, format_explanations
from ortprep.build.receipts import NOT_OURS, read_receipt, write_receipt
from ortprep.bundle import user_key
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.verification import describe_files
from ortprep.errors import StageError
from tests.build.fakes import Count, Shout, tasks


@pytest.fixture
def cache(tmp_path):
    return DigestCache(tmp_path / "cache")


@pytest.fixture
def artifacts(tmp_path):
    return tmp_path / "artifacts"


def run_all(builds, cache):
    return [run_task(task, cache=cache, say=lambda _: None) for task in builds]


def test_a_second_run_does_nothing(artifacts, cache):
    shout, count = Shout(), Count()
    assert run_all(tasks(artifacts, shout, count), cache) == [True, True]
    assert run_all(tasks(artifacts, shout, count), cache) == [False, False]
    assert (shout.runs, count.runs) == (["hello"], [5])


@pytest.mark.attack
def test_no_other_user_can_hold_the_lock_of_a_task(artifacts, cache):
    """Whoever can open a lock, if only to read, can keep a build waiting for ever."""
    task = tasks(artifacts, Shout(), Count())[0]
    run_task(task, cache=cache, say=lambda _: None)
    (folder,) = artifacts.rglob("locks")
    assert {oct(lock.stat().st_mode & 0o777) for lock in folder.iterdir()} == {"0o600"}
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    folder.chmod(0o755)  # as older versions left it
    remove_outcome(task)
    run_task(task, cache=cache, say=lambda _: None)
    assert oct(folder.stat().st_mode & 0o777) == "0o700"


def test_cleaning_a_model_leaves_nothing_of_variants_that_its_spec_has_no_more(artifacts, cache):
    task, *_ = tasks(artifacts, Shout(), Count())
    run_task(task, cache=cache, say=lambda _: None)
    old = task.folder.with_name("tune-cpu-int8") / "net.onnx"
    old.parent.mkdir()
    old.write_bytes(b"large")
    remove_intermediates(artifacts, task.model)
    assert [path.name for path in task.folder.parent.iterdir()] == ["locks"]


def test_a_changed_key_runs_the_task_and_those_after_it(artifacts, cache):
    run_all(tasks(artifacts, Shout(), Count()), cache)
    changed = tasks(artifacts, Shout(word="goodbye"), Count())
    assert why_stale(changed[0], cache) == ("word: was hello, is goodbye",)
    assert run_all(changed, cache) == [True, True]


def test_an_equal_outcome_stops_the_wave(artifacts, cache):
    run_all(tasks(artifacts, Shout(), Count()), cache)
    again = Shout()
    again.version = 2
    assert run_all(tasks(artifacts, again, Count()), cache) == [True, False]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "sub/word").write_text("OTHER"), "sub/word: content"),
        (lambda folder: (folder / "sub/word").write_text("LONGER ONE"), "sub/word: size"),
        (lambda folder: (folder / "sub/word").unlink(), "sub/word: missing"),
        (lambda folder: (folder / "extra").write_text(""), "extra: added"),
        (shutil.rmtree, "its files are gone"),
    ],
)
def test_files_that_are_not_as_they_were_left_are_made_again(artifacts, cache, damage, reason):
    builds = tasks(artifacts, Shout(), Count())
    run_all(builds, cache)
    assert callable(damage)
    damage(builds[0].folder)
    assert why_stale(builds[0], cache)[0].startswith(reason)
    assert run_all(builds, cache) == [True, False]
    assert (builds[0].folder / "sub/word").read_text() == "HELLO"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": "99.0"}', "\x00"])
def test_a_damaged_receipt_means_do_it_again(artifacts, cache, content):
    builds = tasks(artifacts, Shout(), Count())
    run_all(builds, cache)
    builds[0].receipt.write_text(content)
    assert why_stale(builds[0], cache) == ("never done",)
    assert run_all(builds, cache) == [True, False]


@pytest.mark.attack
def test_a_receipt_that_another_user_wrote_does_not_count(artifacts, cache, monkeypatch, tmp_path):
    """A clone brings `artifacts/.work`: other weights, and receipts that say they are what was asked for."""
    builds = tasks(artifacts, Shout(), Count())
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "theirs"))
    run_all(builds, cache)
    theirs = builds[0].receipt.read_bytes()
    (builds[0].folder / "sub/word").write_text("OTHER")
    receipt = read_receipt(builds[0].receipt)
    write_receipt(builds[0].receipt, replace(receipt, files=describe_files(builds[0].folder)))
    assert why_stale(builds[0], cache) == ()
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "mine"))
    assert why_stale(builds[0], cache) == (NOT_OURS,)
    shout, count = format_explanations(explain_tasks(builds, cache=cache)), builds[1]
    assert f"    {NOT_OURS}" in list(shout)
    assert why_stale(count, cache) == (NOT_OURS,)
    assert run_all(builds, cache) == [True, True]
    assert (builds[0].folder / "sub/word").read_text() == "HELLO"
    assert run_all(builds, cache) == [False, False]
    builds[0].receipt.write_bytes(theirs)
    assert why_stale(builds[0], cache) == (NOT_OURS,)


@pytest.mark.attack
@pytest.mark.parametrize("mac", ["", "0" * 64, 7, None, "é"])
def test_a_receipt_that_was_changed_does_not_count(artifacts, cache, mac):
    builds = tasks(artifacts, Shout(), Count())
    run_all(builds, cache)
    data = json.loads(builds[0].receipt.read_text())
    builds[0].receipt.write_text(json.dumps(data | {"task": "other"}))
    assert why_stale(builds[0], cache) == (NOT_OURS,)
    builds[0].receipt.write_text(json.dumps(data | {"mac": mac}))
    assert why_stale(builds[0], cache) == (NOT_OURS,)


def test_without_a_cache_folder_receipts_count_for_their_own_process(artifacts, cache, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", "/dev/null")
    builds = tasks(artifacts, Shout(), Count())
    assert run_all(builds, cache) == [True, True]
    assert run_all(builds, cache) == [False, False]
    monkeypatch.setattr(user_key, "_PROCESS_KEY", bytes(32))
    assert why_stale(builds[0], cache) == (NOT_OURS,)


def test_a_moved_project_is_up_to_date(tmp_path, cache):
    run_all(tasks(tmp_path / "old", Shout(), Count()), cache)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    assert run_all(tasks(tmp_path / "new", Shout(), Count()), cache) == [False, False]


def test_a_failure_leaves_the_old_outcome_and_keeps_message_and_hint(artifacts, cache):
    run_all(tasks(artifacts, Shout(), Count()), cache)
    broken = tasks(artifacts, Shout(word="goodbye", fails=True), Count())
    with pytest.raises(StageError, match="shout of m: lost its voice") as caught:
        run_task(broken[0], cache=cache, say=lambda _: None)
    assert caught.value.hint == "drink tea"
    assert (broken[0].folder / "sub/word").read_text() == "HELLO"
    assert run_all(tasks(artifacts, Shout(), Count()), cache) == [False, False]


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), OSError(errno.EIO, "Input/output error")])
def test_a_key_that_cannot_be_computed_is_told_like_work_that_fails(artifacts, cache, error):
    class Keyless(Shout):
        def key(self, plan, variant):
            raise error

    run_all(tasks(artifacts, Shout(), Count()), cache)
    shout, count = explain_tasks(tasks(artifacts, Keyless(), Count()), cache=cache)
    (reason,) = shout.reasons
    assert reason.startswith("it would fail: ")
    assert count.reasons == ("shout runs before it",)
    with pytest.raises(StageError) as caught:
        run_task(tasks(artifacts, Keyless(), Count())[0], cache=cache, say=lambda _: None)
    assert caught.value.message == reason.removeprefix("it would fail: ")


def test_explain_says_what_runs_and_what_follows_from_it(artifacts, cache):
    run_all(tasks(artifacts, Shout(), Count()), cache)
    explained = explain_tasks(tasks(artifacts, Shout(word="goodbye"), Count()), cache=cache)
    assert list(format_explanations(explained)) == [
        "m: shout: runs, because",
        "    word: was hello, is goodbye",
        "m: count/cpu: runs, because",
        "    shout runs before it",
    ]
    unborn = explain_tasks(tasks(artifacts, Shout(), Count(), name="new"), cache=cache)
    assert [item.reasons for item in unborn] == [("never done",), ("shout runs before it",)]
    current = explain_tasks(tasks(artifacts, Shout(), Count()), cache=cache)
    assert list(format_explanations((*current, *unborn))) == [
        "m: up to date, shout, count",
        "new: never done; runs shout, count",
    ]


RACER = """
import sys
from pathlib import Path
from ortprep.bundle.digest import DigestCache
from ortprep.build.execution import run_task
from tests.build.fakes import Count, Shout, tasks
shout = Shout()
task = tasks(Path(sys.argv[1]), shout, Count())[0]
print("ready", flush=True)
sys.stdin.readline()
print(run_task(task, cache=DigestCache(Path(sys.argv[2])), say=lambda line: None))
"""


def test_of_two_builds_at_once_one_works_and_the_other_finds_it_done(artifacts, tmp_path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(artifacts), str(tmp_path / "cache")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    outcomes = [racer.communicate("go\n")[0].strip() for racer in racers]
    assert sorted(outcomes) == ["False", "True"]


SLEEPER = """
import sys, time
from pathlib import Path
from ortprep.bundle.digest import DigestCache
from ortprep.build.execution import run_task
from tests.build.fakes import Count, Shout, tasks
class Slow(Shout):
    def run(self, context):
        result = super().run(context)
        print("working", flush=True)
        time.sleep(3600)
        return result
run_task(tasks(Path(sys.argv[1]), Slow(), Count())[0], cache=DigestCache(), say=lambda line: None)
"""


def test_a_build_killed_at_work_leaves_nothing_that_counts_and_no_lock(artifacts, cache):
    sleeper = subprocess.Popen([sys.executable, "-c", SLEEPER, str(artifacts)], stdout=subprocess.PIPE)
    with sleeper:
        assert sleeper.stdout.readline() == b"working\n"
        os.kill(sleeper.pid, signal.SIGKILL)
    builds = tasks(artifacts, Shout(), Count())
    assert why_stale(builds[0], cache) == ("never done",)
    assert run_all(builds, cache) == [True, True]
    assert not list(builds[0].folder.parent.glob(".tmp-*"))
