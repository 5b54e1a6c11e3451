"""The compared ways to load a model: default, recipe, prepared, first phase, portable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.loader_config import Requirements
from ortprep.bundle.onnx_wire import external_locations, read_skeleton
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.errors import PipelineError
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.runtime.loading.session import CUDA, build_session
from ortprep.stages.core.contract import PORTABLE, Context, Plan, VariantPlan
from ortprep.stages.core.sources import read_fetched, read_prepared, read_tuned
from ortprep.stages.measure.decision import DEFAULT, FIRST
from ortprep.stages.optimize.session_plans import loading_options, loading_providers
from ortprep.tuning.knobs import MAX_INLINE_BYTES

RECIPE = "recipe"
PREPARED = "prepared"
PARENT = "unconverted"
"""The prepared variant that a converted one is compared with: the same in fp32, or for all shapes."""


@dataclass(frozen=True)
class Contender:
    """One way to load the model.

    Attributes:
        name: `default`, `recipe`, `prepared`, `first phase`, `portable` or `unconverted`.
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
    """Returns every contender but the recipe, whose file has to be written first."""
    compared = compared_variants(context.plan, context.variant_plan.name)
    return (
        source_contender(context),
        *(_variant(context, name, variant) for name, variant in compared.items()),
        *_first_phase(context),
    )


def source_contender(context: Context, name: str = DEFAULT) -> Contender:
    """Returns the source in plain ONNX Runtime, on the target's provider with the user's options."""
    fetched = read_fetched(context)
    runtime = context.spec.runtime
    options = loading_options(runtime, level="ORT_ENABLE_ALL")
    plan = SessionPlan(str(fetched.path), options, loading_providers(runtime, context.target))
    return Contender(name, plan, fetched.folder)


def _variant(context: Context, name: str, variant: str) -> Contender:
    result, folder = read_prepared(context, variant)
    plan = SessionPlan(str(folder / result.model), result.session_options, result.providers)
    tuned = read_tuned(context, variant)
    io_binding = tuned is not None and tuned.io_binding
    return Contender(name, plan, folder, io_binding=io_binding, requirements=result.requirements)


def _first_phase(context: Context) -> tuple[Contender, ...]:
    variant = context.variant_plan.name
    tuned = read_tuned(context, variant)
    if tuned is None or tuned.first_phase is None:
        return ()
    first, (result, folder) = tuned.first_phase, read_prepared(context, variant)
    plan = SessionPlan(str(folder / (first.model or result.model)), first.session_options, first.providers)
    return (Contender(FIRST, plan, folder, requirements=result.requirements),)


@contextmanager
def written_recipe(context: Context) -> Iterator[tuple[tuple[Contender, ...], Mapping[str, str]]]:
    """Yields the plain recipe while its file exists: optimised graph, weights inline, optimisation off."""
    source = source_contender(context, RECIPE)
    weights_bytes = read_fetched(context).description.source.initializer_bytes
    if weights_bytes > MAX_INLINE_BYTES:
        reason = f"{weights_bytes} bytes of weights do not fit into one protobuf file"
        context.say(f"recipe not measured: {reason}")
        yield (), {RECIPE: reason}
        return
    with TemporaryDirectory(prefix="recipe-", dir=context.folder) as scratch:
        request = {"source": encode(source.plan), "model": str(Path(scratch) / "recipe.onnx")}
        try:
            run_child(write_recipe, request, timeout_s=context.spec.optimize.timeout_s)
        except PipelineError as error:
            context.say(f"recipe not measured: {error.message}")
            yield (), {RECIPE: error.message}
            return
        options = source.plan.session_options._replace(graph_optimization_level="ORT_DISABLE_ALL")
        plan = SessionPlan(request["model"], options, source.plan.providers)
        yield (Contender(RECIPE, plan, Path(scratch)),), {}


def write_recipe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Writes what `optimized_model_filepath` alone gives, with every weight inside; runs in a child.

    Args:
        request: `source`, the default plan, and `model`, the file to write.

    Raises:
        LoadError: ONNX Runtime refuses the model, or cannot write.
    """
    source = decode(SessionPlan, request["source"])
    attributes = {**source.session_options.attributes, "optimized_model_filepath": request["model"]}
    options = source.session_options._replace(attributes=attributes)
    build_session(source._replace(session_options=options))
    written = Path(request["model"])
    if external_locations(read_skeleton(written)):
        from ortprep.stages.core.graphs.inlining import write_inline

        write_inline(written, written, data_folder=Path(source.model).parent)
    return {}
