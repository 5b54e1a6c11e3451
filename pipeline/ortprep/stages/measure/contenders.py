"""The compared ways to load a model: default, prepared, first phase, portable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.loader_config import Requirements
from ortprep.bundle.session_record import SessionPlan
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.runtime.loading.session import CUDA
from ortprep.stages.core.contract import PORTABLE, Context, Plan, VariantPlan
from ortprep.stages.core.sources import read_fetched, read_prepared
from ortprep.stages.measure.decision import DEFAULT, FIRST
from ortprep.stages.optimize.session_plans import loading_options, loading_providers

PREPARED = "prepared"
PARENT = "unconverted"
"""The prepared variant that a converted one is compared with: the same in fp32, or for all shapes."""


@dataclass(frozen=True)
class Contender:
    """One way to load the model.

    Attributes:
        name: `default`, `prepared`, `first phase`, `portable` or `unconverted`.
        folder: Every file that its session reads is below it.
        requirements: Requirements of its bundle; None for plain ONNX Runtime.
    """

    name: str
    plan: SessionPlan
    folder: Path
    io_binding: bool = False
    requirements: Requirements | None = None


def device_of(contenders: Sequence[Contender]) -> str:
    """Returns the device that the plans run on: `cpu` unless one of them is for a GPU."""
    providers = [provider for contender in contenders for provider in contender.plan.providers]
    ordinals = [provider.options.get("device_id", "0") for provider in providers if provider.name == CUDA]
    return f"cuda:{ordinals[0]}" if ordinals else CPU_DEVICE


def is_shipped_as_asked(variant: VariantPlan) -> bool:
    """Returns whether a variant is shipped, faster or not: the spec asks for its precision or its sizes."""
    return variant.parent is not None or bool(variant.binding)


def compared_variants(plan: Plan, variant: str) -> Mapping[str, str]:
    """Returns the prepared variants that are measured together, by the name they have there."""
    parent = plan.variant_plans[variant].parent
    return {PREPARED: variant, PORTABLE: PORTABLE} if parent is None else {PREPARED: variant, PARENT: parent}


def build_contenders(context: Context) -> tuple[Contender, ...]:
    """Returns every way to load the variant's model that is measured."""
    compared = compared_variants(context.plan, context.variant_plan.name)
    return (
        source_contender(context),
        *(_variant(context, name, variant) for name, variant in compared.items()),
        *_first_phase(context),
    )


def source_contender(context: Context) -> Contender:
    """Returns the source in plain ONNX Runtime, on the target's provider with the user's options."""
    fetched = read_fetched(context)
    runtime = context.spec.runtime
    options = loading_options(runtime, level="ORT_ENABLE_ALL")
    plan = SessionPlan(str(fetched.path), options, loading_providers(runtime, context.target))
    return Contender(DEFAULT, plan, fetched.folder)


def _variant(context: Context, name: str, variant: str) -> Contender:
    result, folder = read_prepared(context, variant)
    return Contender(
        name,
        result.plan_in(folder),
        folder,
        io_binding=result.variant.io_binding,
        requirements=result.variant.requirements,
    )


def _first_phase(context: Context) -> tuple[Contender, ...]:
    result, folder = read_prepared(context, context.variant_plan.name)
    variant, first = result.variant, result.variant.first_phase
    if first is None:
        return ()
    plan = SessionPlan(str(folder / (first.model or variant.model)), first.session_options, first.providers)
    return (Contender(FIRST, plan, folder, requirements=variant.requirements),)
