"""The manifest's record of the search for a plan: every trial, the finals, the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord


@dataclass(frozen=True)
class TrialRecord:
    """One plan that was tried.

    Attributes:
        number: In the order they were tried.
        kind: Reason of the trial: `default`, `base`, `form`, `change`.
        choice: Value by knob; `plan: default` for default ONNX Runtime.
        session_options: Options of the session; None where it could not come to that.
        providers: Execution providers; None where it could not come to that.
        figures: Measured costs, None if it failed.
        failure: Reason for missing figures, None if there are figures.
        violations: Limits the figures exceed.
        final: Figures of the last comparison, for the plans that took part in it.
    """

    number: int
    kind: str
    choice: Mapping[str, str]
    session_options: SessionOptionsRecord | None
    providers: tuple[ProviderRecord, ...]
    figures: PlanFigures | None
    failure: str | None = None
    violations: tuple[str, ...] = ()
    final: PlanFigures | None = None


@dataclass(frozen=True)
class FirstPhaseRecord:
    """The plan that may serve until the chosen one is ready.

    Attributes:
        trial: Its number.
        overlap_mb: Private memory of both sessions together once both are ready, in MB of 2**20 bytes;
            interpreter and libraries count twice.
    """

    trial: int
    overlap_mb: float


@dataclass(frozen=True)
class TuningRecord:
    """A search for a plan.

    Attributes:
        runs_per_load: Runs of a session before it is gone: what the costs are of.
        limits: Limits of a plan, by name.
        knobs: Searched values by knob, the base plan's first.
        trials: Every plan that was tried.
        chosen: Number of the plan that was prepared.
        reason: One sentence with the figures.
        ended: Reason for the end of the search.
        noise: Distance between the quartiles of a plan's cost relative to the default's of the same round.
        elapsed_s: Duration of the search, in seconds.
        first_phase: Plan that may serve first, None for none.
    """

    runs_per_load: int
    limits: Mapping[str, float]
    knobs: Mapping[str, tuple[str, ...]]
    trials: tuple[TrialRecord, ...]
    chosen: int
    reason: str
    ended: str
    noise: float
    elapsed_s: float
    first_phase: FirstPhaseRecord | None = None
