"""Trials on disk: what was finished is there after any end; what is not readable is told or done again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortprep.errors import TuningError
from ortprep.tuning.journal import Journal
from ortprep.tuning.objective import Figures, Objective, Trial
from ortprep.tuning.space import DEFAULT, RECIPE, PlanChoice, Space
from tests.tuning.builders import TRANSFORMER, cpu_space, plan

SPACE = cpu_space(TRANSFORMER, cores=2, levels=("all",))
OBJECTIVE = Objective(100)
FIGURES = Figures(
    ready_ms=400.0, init_ms=0.1 + 0.2, first_ms=64.0, steady_ms=22.0, private_mb=620.0, peak_mb=900.0
)
ON_GPU = Figures(
    ready_ms=0.5, init_ms=1.0, first_ms=2.0, steady_ms=3.0, private_mb=4.0, peak_mb=5.0, gpu_mb=6.5
)

TRIALS = (
    Trial(0, "default", DEFAULT, (FIGURES,) * 2, (FIGURES,) * 2, elapsed_s=1.25),
    Trial(1, "base", SPACE.base, (FIGURES, ON_GPU), (FIGURES,) * 2, elapsed_s=1.0),
    Trial(2, "recipe", RECIPE, (), (), failure="it crashed\n  with “quotes” and 'ü'"),
    Trial(3, "screening", plan(SPACE, prepacking="off"), (ON_GPU,), (FIGURES,)),
    Trial(4, "screening", plan(SPACE, form="ort"), (FIGURES,), (FIGURES,), failure="answers wrongly"),
)


def open_journal(path: Path, *, space: Space = SPACE, seed: int = 0) -> Journal:
    return Journal(path, space, OBJECTIVE, seed=seed)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.log"


@pytest.fixture
def written(path: Path) -> Path:
    """A journal with every trial in it."""
    journal = open_journal(path)
    for trial in TRIALS:
        journal.record(trial)
    return path


def test_a_new_journal_knows_nothing(path: Path) -> None:
    assert open_journal(path).known() == {}


def test_trials_come_back_as_they_were_told(written: Path) -> None:
    assert open_journal(written).known() == {trial.choice: trial for trial in TRIALS}


def test_opening_a_journal_again_adds_nothing_that_is_a_trial(written: Path) -> None:
    for _ in range(3):
        assert len(open_journal(written).known()) == len(TRIALS)


def test_a_suggestion_is_a_choice_of_the_space_and_no_trial(written: Path) -> None:
    journal = open_journal(written)
    for _ in range(10):
        suggested = journal.suggest(TRIALS)
        assert suggested is not None
        assert len(SPACE.settings(suggested)) == len(SPACE.knobs)
    assert open_journal(written).known() == {trial.choice: trial for trial in TRIALS}


def test_a_sampler_that_knows_of_failures_only_still_suggests(path: Path) -> None:
    journal = open_journal(path)
    journal.record(TRIALS[2])
    journal.record(Trial(1, "base", SPACE.base, (), (), failure="it crashed"))
    assert journal.suggest(()) is not None


def test_equal_seeds_suggest_the_same(tmp_path: Path) -> None:
    def suggest(name: str, seed: int) -> list[PlanChoice | None]:
        journal = open_journal(tmp_path / name, seed=seed)
        for trial in TRIALS:
            journal.record(trial)
        return [journal.suggest(TRIALS) for _ in range(5)]

    assert suggest("a", 1) == suggest("b", 1)
    assert suggest("a", 1) != suggest("c", 2)


def test_a_journal_cut_off_anywhere_in_its_last_line_loses_that_trial_alone(written: Path) -> None:
    whole = written.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for end in (last + 1, last + 2, (last + len(whole)) // 2, len(whole) - 2, len(whole) - 1):
        written.write_bytes(whole[:end])
        journal = open_journal(written)
        assert journal.known() == {trial.choice: trial for trial in TRIALS[:-1]}
        journal.record(TRIALS[-1])
        assert open_journal(written).known() == {trial.choice: trial for trial in TRIALS}


def test_a_journal_cut_off_before_any_trial_is_a_new_one(path: Path) -> None:
    open_journal(path)
    for end in range(0, path.stat().st_size, 7):
        path.write_bytes(path.read_bytes()[:end])
        journal = open_journal(path)
        journal.record(TRIALS[0])
        assert list(journal.known()) == [DEFAULT]


def test_a_lock_that_a_killed_run_held_keeps_nobody_waiting(written: Path) -> None:
    lock = written.with_name(f"{written.name}.lock")
    lock.symlink_to(written)
    journal = open_journal(written)
    journal.record(TRIALS[0])
    assert not lock.is_symlink()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 100 + b"\n",
        b"not a journal\n",
        b"\xff\xfe\n",
        b"42\n",
        b"null\n",
        b"[]\n",
        b"{}\n",
        b'{"op_code": 0}\n',
        b'{"op_code": 999, "worker_id": "x"}\n',
        b'{"op_code": "a", "worker_id": 3}\n',
    ],
)
@pytest.mark.parametrize("place", ["alone", "first", "last"])
def test_a_file_that_is_no_journal_is_told_with_what_to_do(written: Path, garbage: bytes, place: str) -> None:
    whole = written.read_bytes()
    content = {"alone": garbage, "first": garbage + whole, "last": whole + garbage}[place]
    written.write_bytes(content)
    with pytest.raises(TuningError, match=f"^cannot open the journal of trials: {written}\n  ") as caught:
        open_journal(written)
    assert caught.value.hint == f"rm {written}"


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="cannot open the journal of trials"):
        open_journal(tmp_path / "nowhere" / "journal.log")


def test_a_trial_with_a_record_that_cannot_be_read_is_tried_again(written: Path) -> None:
    damaged = written.read_bytes().replace(b'"kind":"recipe"', b'"kind":["recipe"]')
    assert damaged != written.read_bytes()
    written.write_bytes(damaged)
    readable = [trial for trial in TRIALS if trial.kind != "recipe"]
    assert open_journal(written).known() == {trial.choice: trial for trial in readable}
