"""The compared ways to load a model: default, prepared, first phase, portable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ortprep.bundle.loader_config import Requirements, Variant, VersionRange
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.measuring.shipped import DEFAULT, FIRST, PARENT, PORTABLE, PREPARED
from ortprep.runtime.loading.session import CUDA
from ortprep.stages.core.contract import Context, Plan, VariantPlan
from ortprep.stages.core.results import read_fetched, read_prepared
from ortprep.stages.optimize.session_plans import loading_options, loading_providers

Candidate = tuple[Path, Variant]
"""One way to load the model: the folder with every file that its session reads, and how it is loaded."""


def device_of(variant: Variant) -> str:
    """Returns the device that a variant runs on: `cpu` or `cuda:<index>`."""
    ordinals = [one.options.get("device_id", "0") for one in variant.providers if one.name == CUDA]
    return f"cuda:{ordinals[0]}" if ordinals else CPU_DEVICE


def is_shipped_as_asked(variant: VariantPlan) -> bool:
    """Returns whether a variant is shipped, faster or not: the spec asks for its precision or its sizes."""
    return variant.parent is not None or bool(variant.binding)


def compared_variants(plan: Plan, variant: str) -> Mapping[str, str]:
    """Returns the prepared variants that are measured together, by the name they have there."""
    parent = plan.variant_plans[variant].parent
    return {PREPARED: variant, PORTABLE: PORTABLE} if parent is None else {PREPARED: variant, PARENT: parent}


def build_candidates(context: Context) -> dict[str, Candidate]:
    """Returns every way to load the variant's model that is measured, by name.

    The names are `default`, `prepared`, `first phase`, `portable` and `unconverted`.
    """
    plan = context.variant_plan
    candidates = {DEFAULT: default_candidate(context, plan)}
    for name, variant in compared_variants(context.plan, plan.name).items():
        prepared, folder = read_prepared(context, variant)
        candidates[name] = folder, prepared.variant
    folder, later = candidates[PREPARED]
    if (first := later.first_phase) is not None:
        early = later._replace(session_options=first.session_options, providers=first.providers)
        candidates[FIRST] = folder, early
    return candidates


def default_candidate(context: Context, plan: VariantPlan) -> Candidate:
    """Returns the source in plain ONNX Runtime, on a variant's provider with the user's options."""
    fetched, runtime = read_fetched(context), context.spec.runtime
    providers = loading_providers(runtime, plan.target)
    variant = Variant(
        name=plan.name,
        target=plan.target,
        model=fetched.description.model,
        files=(),
        session_options=loading_options(runtime, level="ORT_ENABLE_ALL"),
        providers=providers,
        # Any version that loads the source; `package` says which, if this ships.
        requirements=Requirements(VersionRange("0"), tuple(provider.name for provider in providers)),
    )
    return fetched.folder, variant
