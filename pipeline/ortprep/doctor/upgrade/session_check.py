"""The child function that runs in another environment: it has numpy, ONNX Runtime and this package only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.session_record import SessionPlan
from ortprep.errors import LoadError


@dataclass(frozen=True)
class SessionRequest:
    """A session that has to answer a bundle's golden sample.

    Attributes:
        bundle: Folder of the bundle, which records the answers.
        target: Target for `load`.
        plan: Plan of the source in plain ONNX Runtime; None for the bundle by `load`.
    """

    bundle: str
    target: str | None
    plan: SessionPlan | None


@dataclass(frozen=True)
class SessionCheck:
    """A session that answers the golden sample as recorded.

    Attributes:
        variant: The bundle's variant that `load` took; None for plain ONNX Runtime.
        passed_over: Variants the bundle prefers to it, each with what this version or machine lacks.
        io_binding: Whether that variant's runs have to bind inputs and outputs.
    """

    variant: str | None = None
    passed_over: tuple[str, ...] = ()
    io_binding: bool = False


def check_session(request: SessionRequest) -> SessionCheck:
    """Loads a bundle as a job does, or its source, and compares the answers with the recorded ones.

    Raises:
        LoadError: The session cannot be made, or an answer is outside its tolerance.
        PipelineError: The bundle cannot be loaded.
    """
    if request.plan is not None:
        _check_source(request.plan, Path(request.bundle))
        return SessionCheck()
    from ortprep.runtime.loading.bundle_loader import open_bundle

    opened = open_bundle(request.bundle, target=request.target, check="golden")
    variant, passed_over = opened.variant, tuple(map(str, opened.passed_over))
    return SessionCheck(variant.name, passed_over, variant.io_binding)


def _check_source(plan: SessionPlan, root: Path) -> None:
    """Runs the source by plain ONNX Runtime; raises `LoadError` if it answers otherwise than recorded."""
    from ortprep.bundle.loader_config import read_loader_config
    from ortprep.runtime.loading.session import build_session, onnxruntime_errors
    from ortprep.runtime.tensors.arrays import run_session
    from ortprep.runtime.verification.golden import find_problems, read_golden

    golden = read_loader_config(root).golden
    feeds, expected = read_golden(golden, root)
    session = build_session(plan)
    try:
        answers = run_session(session, feeds)
    except onnxruntime_errors() as error:
        problem = f"the source cannot run the golden sample: {plan.model}"
        raise LoadError(f"{problem}\n  {type(error).__name__}: {error}") from error
    if problems := find_problems(golden, expected, answers):
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise LoadError(f"the source's answers differ from the recorded ones: {plan.model}{lines}")
