"""Which targets of a spec are built on this machine: a pure decision over what is available."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import get_args

from pipeline.errors import SpecError
from pipeline.spec.fields import Target
from pipeline.spec.models import ModelSpec
from pipeline.stages.contract import Plan

log = logging.getLogger(__name__)

KNOWN_TARGETS: tuple[str, ...] = get_args(Target)
"""Every target; a runtime job prefers later ones."""

Availability = Callable[[str], str | None]
"""Says why this machine cannot build for a target, or None if it can."""


def build_plan(
    spec: ModelSpec,
    *,
    unavailable_reason: Availability,
    only: str | None = None,
    skip_unavailable: bool = False,
) -> Plan:
    """Decides what is built of one spec.

    Args:
        spec: The model; `targets: auto` takes whatever is available.
        unavailable_reason: Asked once for each target that matters.
        only: Build this target alone.
        skip_unavailable: Build the rest when a named target is not available.

    Raises:
        SpecError: A named target is not available, `only` is none of the spec's, or nothing is left to build.
    """
    wanted = KNOWN_TARGETS if spec.targets == "auto" else tuple(dict.fromkeys(spec.targets))
    if only is not None and only not in wanted:
        raise SpecError(
            f"no such target in {spec.name}: {only}\n  expected one of {', '.join(wanted)}",
            hint=f"add it to targets: of the spec, or run: ortprep prepare {spec.name}"
            if only in KNOWN_TARGETS
            else f"ortprep prepare {spec.name}",
        )
    missing = {target: "left out by --target" for target in wanted if only not in (None, target)}
    reasons = {target: unavailable_reason(target) for target in wanted if target not in missing}
    lacking = {target: reason for target, reason in reasons.items() if reason is not None}
    named = spec.targets != "auto" or only is not None
    if lacking and named and not skip_unavailable:
        raise _unavailable(spec.name, lacking, wanted=wanted)
    if named:
        missing |= lacking
    targets = tuple(
        target for target in reversed(KNOWN_TARGETS) if target in reasons and target not in lacking
    )
    if not targets:
        raise _unavailable(spec.name, lacking, wanted=wanted)
    return Plan(spec=spec, targets=targets, missing=missing)


def build_plans(
    specs: Iterable[ModelSpec],
    *,
    unavailable_reason: Availability,
    only: str | None = None,
    skip_unavailable: bool = False,
) -> tuple[Plan, ...]:
    """Decides for several specs and reports every problem at once.

    With `skip_unavailable`, a spec of which nothing can be built here is left out, with a warning, as long as
    another can.

    Raises:
        SpecError: One of them cannot be built here, or, with `skip_unavailable`, none of them can.
    """
    plans, problems = [], []
    for spec in specs:
        try:
            plan = build_plan(
                spec, unavailable_reason=unavailable_reason, only=only, skip_unavailable=skip_unavailable
            )
            plans.append(plan)
        except SpecError as error:
            problems.append(error)
    if skip_unavailable and plans:
        for problem in problems:
            log.warning("left out: %s", problem.message)
    elif problems:
        raise SpecError("\n".join(problem.message for problem in problems), hint=problems[0].hint)
    return tuple(plans)


def _unavailable(name: str, lacking: dict[str, str], *, wanted: tuple[str, ...]) -> SpecError:
    nothing_left = len(lacking) == len(wanted)
    lines = "\n".join(f"  {target}: {reason}" for target, reason in lacking.items())
    return SpecError(
        f"target not available on this machine: {', '.join(lacking)} of {name}\n{lines}",
        hint=f"targets: [cpu]   # in the spec of {name}; every machine has it"
        if nothing_left
        else f"ortprep prepare {name} --skip-unavailable",
    )
