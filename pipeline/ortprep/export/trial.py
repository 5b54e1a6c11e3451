"""An exported model on this machine, as its server will make the session: does it answer as recorded?

A child does it, so that nothing heavy happens in the caller's process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.loader_config import TensorSpec, Variant, find_variant, read_loader_config
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.errors import ChildError

_HERE = __name__

TIMEOUT_S = 3600.0
"""As long as an optimisation may take by default."""


@dataclass(frozen=True)
class TrialRun:
    """What a session of an exported model says of itself.

    Attributes:
        missing: What this machine lacks for it; there was no session then, and no tensors.
        inputs: As the session lists them; symbolic sizes by name or None.
        outputs: As the session lists them.
    """

    missing: tuple[str, ...] = ()
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def __str__(self) -> str:
        if self.missing:
            return f"not tried on this machine: {'; '.join(self.missing)}"
        return (
            "loaded on this machine with the options that are left, it answers the golden sample as recorded"
        )


def try_model(
    bundle: Path, variant: Variant, plan: SessionPlan, *, timeout_s: float | None = TIMEOUT_S
) -> TrialRun:
    """Makes the session of an exported model and compares its answers with the golden sample.

    Raises:
        LoadError: It does not load, or does not answer as recorded.
        ChildError: The process died, or its deadline passed.
        BundleError: The bundle cannot be read.
    """
    request = {"bundle": os.path.realpath(bundle), "variant": variant.name, "plan": encode(plan)}
    try:
        return decode(TrialRun, run_child(run_trial, request, timeout_s=timeout_s).value)
    except ChildError as error:
        raise type(error)(f"export of variant {variant.name!r}: {error.message}", hint=error.hint) from error


def run_trial(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function: makes the session, checks its answers, and says what it takes and gives.

    Args:
        request: `bundle`, its folder; `variant`, its name; `plan`, a `SessionPlan` as JSON types.

    Returns:
        A `TrialRun` as JSON types.
    """
    from ortprep.runtime.loading.session import build_session
    from ortprep.runtime.loading.variant_selection import find_reasons_here
    from ortprep.runtime.verification.golden import check_answers

    root = Path(request["bundle"])
    config = read_loader_config(root)
    variant = find_variant(config, request["variant"])
    assert variant is not None  # the caller has it from the same file
    missing = find_reasons_here(variant)
    if missing:
        return dict(encode(TrialRun(missing)))
    session = build_session(decode(SessionPlan, request["plan"]))
    check_answers(session, config, root, variant=variant)
    return dict(encode(TrialRun((), _describe(session.get_inputs()), _describe(session.get_outputs()))))


def _describe(values: Any) -> tuple[TensorSpec, ...]:
    return tuple(_tensor(one.name, one.type, one.shape) for one in values)


def _tensor(name: str, type_name: str, shape: list[int | str | None]) -> TensorSpec:
    inner = type_name.removeprefix("tensor(").removesuffix(")")
    dtype = {"float": "float32", "double": "float64"}.get(inner, inner)
    return TensorSpec(name, dtype if type_name.startswith("tensor(") else type_name, tuple(shape))
