"""Trials on disk and the sampler that learns from them: Optuna, kept to this module.

Every trial that is over is an Optuna trial whose user attribute holds our record of it, in Optuna's journal
file: a line per operation, appended, so that a process killed at any instant loses the batch it was at and
nothing else. The last comparison is not kept: its rounds belong together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.bundle.codec import decode, encode
from pipeline.errors import BundleError, TuningError
from pipeline.tuning.objective import Objective, Trial
from pipeline.tuning.space import Choice, Space

log = logging.getLogger(__name__)

_STUDY = "tune"
_RECORD = "record"

_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What Optuna raises for a file that is none of its journals: it takes every line for one of its own."""


class Journal:
    """The study of one search, kept in a file that outlives an interrupted run."""

    def __init__(self, path: Path, space: Space, objective: Objective, *, seed: int) -> None:
        """Opens the file, or makes it.

        Args:
            path: The journal.
            space: What can be chosen; the file's trials must be of the same.
            objective: What a trial's value is.
            seed: Of the sampler.

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
                f"cannot open the journal of trials: {path}\n  {error}", hint=f"rm {path}"
            ) from error

    def known(self) -> Mapping[Choice, Trial]:
        """Returns the trials an earlier run finished; what cannot be read is left out and tried again."""
        found: dict[Choice, Trial] = {}
        for kept in self._study.get_trials(deepcopy=False):
            try:
                trial = decode(Trial, kept.user_attrs.get(_RECORD))
            except BundleError as error:
                log.debug("trial %d of the journal left out: %s", kept.number, error)
                continue
            found[trial.choice] = trial
        return found

    def record(self, trial: Trial) -> None:
        """Appends a trial that is over."""
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

    def suggest(self, _: Sequence[Trial]) -> Choice | None:
        """Has the sampler name a plan; the trial it opens for that is closed again: the search may refuse."""
        asked = self._study.ask(self._distributions)
        values = tuple((knob.name, str(asked.params[knob.name])) for knob in self._space.knobs)
        self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
        return Choice(values)


def _mend(path: Path) -> None:
    """Removes what a run that was killed while it wrote has left: half a line, and Optuna's lock.

    Optuna would take the half for the beginning of the next line, and wait 30 s for the lock. Nobody else
    holds it: one process at a time works on a task.
    """
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if not path.exists():
        return
    with path.open("rb+") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
