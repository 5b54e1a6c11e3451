"""Does every variant of a bundle that this machine can run load, and answer as recorded?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.loader_config import LoaderConfig, Variant, read_loader_config
from ortprep.children.child import run_child
from ortprep.errors import ChildError, LoadError
from ortprep.quoting import quoted
from ortprep.runtime.loading.variant_selection import PassedOver, find_reasons_here

if TYPE_CHECKING:
    from ortprep.runtime.loading.load_options import Phases


TIMEOUT_S = 600.0
"""Timeout of what a stranger's model may do, in seconds, unless the caller has another."""


def check_variants(bundle: Path, *, timeout_s: float = TIMEOUT_S) -> Iterator[PassedOver]:
    """Loads each variant whose requirements are met, in a process of its own, and runs the golden sample.

    Yields what this machine lacks for each, in the bundle's order of preference: nothing for one that
    answered as recorded. `timeout_s` is for each.

    Raises:
        LoadError: A variant does not load or does not answer as recorded, or this machine can run none.
        ChildError: The process died, or its deadline passed.
        BundleError: The bundle or its golden sample cannot be read.
    """
    passed_over = []
    config = read_loader_config(bundle)
    for variant in config.variants:
        request = bundle.absolute(), variant.name
        try:
            checked = PassedOver(variant.name, run_child(check_variant, request, timeout_s=timeout_s).value)
        except ChildError as error:
            what = f"variant {variant.name!r} of {bundle}: {error.message}"
            raise type(error)(what, hint=error.hint) from error
        yield checked
        if checked.reasons:
            passed_over.append(checked)
    if len(passed_over) == len(config.variants):
        lines = "\n".join(f"  {variant}" for variant in passed_over)
        raise LoadError(
            f"no variant of {config.name} runs on this machine: {bundle}\n{lines}",
            hint=f"ortprep prepare {quoted(config.name)}",
        )


def check_variant(request: tuple[Path, str]) -> tuple[str, ...]:
    """Child function: returns what this machine lacks for a variant, or checks its answers."""
    bundle, name = request
    root = Path(os.path.realpath(bundle))
    config = read_loader_config(root)
    variant = next(variant for variant in config.variants if variant.name == name)
    reasons = find_reasons_here(variant)
    if not reasons:
        _require_answers(config, root, variant)
    return reasons


def _require_answers(config: LoaderConfig, root: Path, variant: Variant) -> None:
    """Raises unless each phase of a variant answers the golden sample as recorded."""
    from ortprep.runtime.loading.golden import check_answers
    from ortprep.runtime.loading.session import build_session
    from ortprep.runtime.loading.variant_resolver import build_plan

    choices: tuple[Phases, ...] = ("steady",) if variant.first_phase is None else ("steady", "first")
    for choice in choices:
        session = build_session(build_plan(root, variant, choice=choice))
        check_answers(session, config, root, variant=variant)
        del session  # gives its memory back before the next one is made
