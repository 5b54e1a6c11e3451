"""Trials on disk and the sampler that learns from them: Optuna, kept to this module.

Every finished trial is an Optuna trial whose user attribute holds our record of it, in Optuna's journal file.
A process killed at any instant loses its current batch only. The last comparison is not kept: its rounds
belong together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.errors import BundleError, TuningError
from ortprep.quoting import quoted
from ortprep.tuning.objective import Objective, Trial
from ortprep.tuning.space import PlanChoice, Space

log = logging.getLogger(__name__)

_STUDY = "tune"
_RECORD = "record"

_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What Optuna raises for a file that is none of its journals: it takes every line for one of its own."""


class Journal:
    """The study of one search, kept in a file that outlives an interrupted run."""

    def __init__(self, path: Path, space: Space, objective: Objective, *, seed: int) -> None:
        """Opens the file, or makes it.

        Raises:
            TuningError: The file cannot be read or written.
        """
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna: Any = optuna
        self._space, self._objective = space, objective
        self._distributions: dict[str, Any] = {
            knob.name: optuna.distributions.CategoricalDistribution(knob.values) for knob in space.knobs
        }
        try:
            _mend(path)
            self._study = optuna.create_study(
                study_name=_STUDY,
                storage=JournalStorage(JournalFileBackend(str(path))),
                sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=0),
                load_if_exists=True,
            )
        except _UNREADABLE as error:
            raise TuningError(
                f"cannot open the journal of trials: {path}\n  {error}", hint=f"rm {quoted(path)}"
            ) from error

    def known(self) -> Mapping[PlanChoice, Trial]:
        """Returns an earlier run's trials; one that cannot be read is tried again."""
        found: dict[PlanChoice, Trial] = {}
        for stored in self._study.get_trials(deepcopy=False):
            try:
                trial = decode(Trial, stored.user_attrs.get(_RECORD))
            except BundleError as error:
                log.debug("skipping trial %d of the journal: %s", stored.number, error)
                continue
            found[trial.choice] = trial
        return found

    def record(self, trial: Trial) -> None:
        """Appends a finished trial."""
        states = self._optuna.trial.TrialState
        own = {knob.name for knob in self._space.knobs} <= trial.choice.as_dict().keys()
        works = trial.failure is None and bool(trial.figures)
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=states.COMPLETE if works else states.FAIL,
                value=self._objective.score(trial) if works else None,
                params=trial.choice.as_dict() if own else {},
                distributions=self._distributions if own else {},
                user_attrs={_RECORD: encode(trial)},
            )
        )

    def suggest(self, _: Sequence[Trial]) -> PlanChoice | None:
        """Asks the sampler for a plan, and closes the trial it opens: the search may refuse it."""
        trial = self._study.ask(self._distributions)
        values = tuple((knob.name, str(trial.params[knob.name])) for knob in self._space.knobs)
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return PlanChoice(values)


def _mend(path: Path) -> None:
    """Removes half a line and Optuna's lock, which a killed run may leave.

    Optuna would join the half with the next line, and wait 30 s for the lock. One process at a time works on
    a task.
    """
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if not path.exists():
        return
    with path.open("rb+") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
