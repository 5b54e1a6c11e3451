"""Possible results of a case of the ONNX backend test suite."""

from __future__ import annotations

from dataclasses import dataclass

EQUAL, NOT_RUN, DIFFERENT, CRASHED = "equal", "not run", "different", "crashed"


@dataclass(frozen=True)
class Verdict:
    """Result of one case.

    Attributes:
        case: Its name in the suite.
        outcome: `equal`; `not run` (ONNX Runtime itself does not give the expected answer from the source);
            `different` (the optimised model answers otherwise); `crashed` (the process died).
        detail: Why; for an equal case, why the steps above `step` did not hold.
        step: Step of the optimisation ladder that held, "" if it was not come to that.
    """

    case: str
    outcome: str
    detail: str = ""
    step: str = ""
