"""Child functions that run in another environment, which has numpy, ONNX Runtime and this package only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.errors import LoadError


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


def check_bundle(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function: loads a bundle as a job does, and compares its answers with the recorded ones.

    Args:
        request: `bundle`, its folder; `target`, as `load` takes it.

    Returns:
        A `SessionCheck` as JSON types.

    Raises:
        PipelineError: As `load` does.
    """
    from ortprep.runtime.loading.bundle_loader import open_bundle

    opened = open_bundle(request["bundle"], target=request["target"], check="golden")
    variant, passed_over = opened.variant, tuple(map(str, opened.passed_over))
    return dict(encode(SessionCheck(variant.name, passed_over, variant.io_binding)))


def check_source(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function: makes a session by plain ONNX Runtime, and compares its answers with the recorded ones.

    Args:
        request: `bundle`, which records the answers; `plan`, a `SessionPlan` as JSON types.

    Returns:
        A `SessionCheck` as JSON types.

    Raises:
        LoadError: The session cannot be made, or an answer is outside its tolerance.
        BundleError: The golden sample cannot be read.
    """
    from ortprep.bundle.loader_config import read_loader_config
    from ortprep.runtime.loading.session import build_session, onnxruntime_errors
    from ortprep.runtime.tensors.arrays import run_session
    from ortprep.runtime.verification.golden import find_problems, read_golden

    root, plan = Path(request["bundle"]), decode(SessionPlan, request["plan"])
    golden = read_loader_config(root).golden
    feeds, expected = read_golden(golden, root)
    session = build_session(plan)
    try:
        answers = run_session(session, feeds)
    except onnxruntime_errors() as error:
        raise LoadError(
            f"the source cannot run the golden sample: {plan.model}\n  {type(error).__name__}: {error}"
        ) from error
    if problems := find_problems(golden, expected, answers):
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise LoadError(f"the source's answers differ from the recorded ones: {plan.model}{lines}")
    return dict(encode(SessionCheck()))
