"""An exported model on this machine, as its server will make the session: does it answer as recorded?

A child does it, so that nothing heavy happens in the caller's process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.loader_config import TensorSpec, Variant, find_variant, read_loader_config
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.errors import ChildError
from ortprep.export.option_mapping import MappedOptions
from ortprep.runtime.loading.variant_resolver import build_plan

TIMEOUT_S = 3600.0
"""Timeout of one trial, the same as an optimisation's default."""


@dataclass(frozen=True)
class TrialRequest:
    """A session to try.

    Attributes:
        bundle: Absolute path of the bundle.
        variant: Name of the variant.
        plan: How the exported model's session is made.
    """

    bundle: str
    variant: str
    plan: SessionPlan


@dataclass(frozen=True)
class TrialResult:
    """What a session of an exported model says of itself.

    Attributes:
        missing: What this machine lacks for it; there was no session then, and no tensors.
        inputs: Inputs as the session lists them; symbolic sizes by name or None.
        outputs: Outputs as the session lists them.
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


def try_model(root: Path, variant: Variant, options: MappedOptions, model: Path) -> TrialResult:
    """Makes the session of an exported model and compares its answers with the golden sample.

    Args:
        root: The bundle's folder.
        variant: The exported variant.
        options: The options that remain.
        model: The model in the export.

    Raises:
        LoadError: It does not load, or does not answer as recorded.
        ChildError: The process died, or its deadline passed.
        BundleError: The bundle cannot be read.
    """
    plan = build_plan(root, variant)._replace(
        model=str(model.absolute()), session_options=options.session_options, providers=options.providers
    )
    request = TrialRequest(os.path.realpath(root), variant.name, plan)
    try:
        return run_child(run_trial, request, timeout_s=TIMEOUT_S).value
    except ChildError as error:
        raise type(error)(f"export of variant {variant.name!r}: {error.message}", hint=error.hint) from error


def run_trial(request: TrialRequest) -> TrialResult:
    """Makes the session in a child process, checks its answers, and lists its inputs and outputs."""
    from ortprep.runtime.loading.session import build_session
    from ortprep.runtime.loading.variant_selection import find_reasons_here
    from ortprep.runtime.verification.golden import check_answers

    root = Path(request.bundle)
    config = read_loader_config(root)
    variant = find_variant(config, request.variant)
    assert variant is not None  # the caller has it from the same file
    if missing := find_reasons_here(variant):
        return TrialResult(missing)
    session = build_session(request.plan)
    check_answers(session, config, root, variant=variant)
    return TrialResult((), _describe(session.get_inputs()), _describe(session.get_outputs()))


def _describe(values: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Returns a session's `NodeArg`s as a bundle describes tensors."""
    described = []
    for one in values:
        inner = one.type.removeprefix("tensor(").removesuffix(")")
        dtype = {"float": "float32", "double": "float64"}.get(inner, inner)
        name = dtype if one.type.startswith("tensor(") else one.type
        described.append(TensorSpec(one.name, name, tuple(one.shape)))
    return tuple(described)
