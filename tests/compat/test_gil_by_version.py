"""Making a session holds the interpreter up to ONNX Runtime 1.30 and not from 1.31; a run never does.

The one measured claim of the tests. It is made where the machine is quiet enough for the check to come to a
verdict at all: the check compares with calls whose answer is known, and is silent where those come out wrong.
"""

from __future__ import annotations

import onnxruntime
import pytest

from pipeline.diagnose.gil.check import diagnose_gil
from pipeline.diagnose.gil.verdict import CREATING
from pipeline.versions import parse_version

pytestmark = pytest.mark.runtime

ATTEMPTS = 5


def clear_verdicts() -> dict[str, str]:
    """Asks until every phase has a verdict, and none only just."""
    for _ in range(ATTEMPTS):
        found = diagnose_gil(model=None, sample=None)
        verdicts: dict[str, str] = found.figures["verdicts"]
        if set(verdicts.values()) <= {"held", "released"}:
            return verdicts
    pytest.skip("the machine is too busy to tell who holds the interpreter")


def test_creation_holds_the_interpreter_only_before_1_31_and_a_run_never() -> None:
    version = parse_version(onnxruntime.__version__)
    assert version is not None
    expected = "released" if version >= (1, 31) else "held"
    verdicts = clear_verdicts()
    assert verdicts.pop("run") == "released"
    assert verdicts
    assert set(verdicts) <= set(CREATING)
    assert set(verdicts.values()) == {expected}
