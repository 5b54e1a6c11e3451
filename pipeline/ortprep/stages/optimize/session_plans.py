"""The sessions of a variant: how far its graph is optimised, how it is written and how jobs load it.

Steps are ways to make the file: the next one is tried when one does not hold. Candidates are ways to load the
model that are measured against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortprep.bundle.loader_config import Requirements, Variant, VersionRange
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.options import format_option
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.spec.models import RuntimeSpec
from ortprep.stages.core.contract import PORTABLE, Context, VariantPlan
from ortprep.stages.core.results import read_fetched

_DISABLE_PREPACKING = "session.disable_prepacking"
_NO_CPU_FALLBACK = "session.disable_cpu_ep_fallback"
_SAVE_PREPACKED = "session.save_external_prepacked_constant_initializers"
_DATA_FILE = "session.optimized_model_external_initializers_file_name"
_DATA_MIN_BYTES = "session.optimized_model_external_initializers_min_size_in_bytes"

MIN_EXTERNAL_BYTES = 16 * 1024
"""Weights from this size on are written to the data file, which is mapped; smaller ones stay in the model.

Each external weight costs an open and a map at load, each inline one a copy. Measured on convolution nets of
5 to 100 MB: 1 KiB to 64 KiB are alike within the noise, 256 KiB is slower and takes more memory. Zero is no
choice at all: shape inference cannot read an external constant, so a graph whose `Reshape` shape is outside
does not load. ONNX Runtime maps them from any offset.
"""

ALL, EXTENDED, BASIC, BASIC_ONLY, SOURCE = "all", "extended", "basic", "basic-only", "source"

LEVELS = {ALL: "ORT_ENABLE_ALL", EXTENDED: "ORT_ENABLE_EXTENDED", BASIC: "ORT_ENABLE_BASIC"}
"""Levels of a spec, the highest first, and ONNX Runtime's names for them."""


@dataclass(frozen=True)
class Step:
    """One way to make the file.

    Attributes:
        name: `all`, `extended`, `basic`, `basic-only` or `source`.
        level: Name of the `GraphOptimizationLevel` of the session that writes it, None for `source`, which is
            copied.
        loading_level: Level of the sessions that load it.
    """

    name: str
    level: str | None
    loading_level: str = "ORT_DISABLE_ALL"


def plan_steps(variant: str, *, level: str) -> tuple[Step, ...]:
    """Returns the steps in the order they are tried; the last one is always the source.

    Args:
        variant: A target, or `portable`, which is never written above BASIC: only that level stays within
            ONNX's own operators. Its loads optimise it further, for the machine that they find themselves on,
            up to the user's level; `basic-only` is what is tried where that fails.
        level: Level that the user starts at: `all`, `extended` or `basic`.
    """
    # The source is not prepared, so its loads optimise it, as plain ONNX Runtime does.
    source = Step(SOURCE, None, loading_level=LEVELS[ALL])
    basic = Step(BASIC, LEVELS[BASIC])
    if variant == PORTABLE:
        for_the_machine = replace(basic, loading_level=LEVELS[level])
        return (for_the_machine, replace(basic, name=BASIC_ONLY), source)
    steps = (Step(ALL, LEVELS[ALL]), Step(EXTENDED, LEVELS[EXTENDED]), basic, source)
    return steps[[step.name for step in steps].index(level) :]


def runtime_key(runtime: RuntimeSpec, target: str) -> Mapping[str, Any]:
    """Returns the user's options that sessions on a target are made with, as JSON types, for keys."""
    return runtime.model_dump(mode="json", exclude=set() if target == "cuda" else {"cuda"})


def loading_options(runtime: RuntimeSpec, *, level: str) -> SessionOptionsRecord:
    """Returns the session options a job gets: the user's, at a graph optimisation level."""
    return SessionOptionsRecord(
        graph_optimization_level=level,
        attributes=runtime.attributes,
        config_entries={key: format_option(value) for key, value in runtime.session_config.items()},
    )


def loading_providers(runtime: RuntimeSpec, variant: str) -> tuple[ProviderRecord, ...]:
    """Returns the execution providers a variant is loaded on, with the user's options.

    CPU is named after CUDA, as plain ONNX Runtime does, unless the user forbids it: naming it would
    contradict `session.disable_cpu_ep_fallback`.
    """
    if variant != "cuda":
        return (ProviderRecord(CPU),)
    cuda = ProviderRecord(CUDA, {key: format_option(value) for key, value in runtime.cuda.items()})
    alone = format_option(runtime.session_config.get(_NO_CPU_FALLBACK, "0")) == "1"
    return (cuda,) if alone else (cuda, ProviderRecord(CPU))


def saving_plan(
    runtime: RuntimeSpec, variant: str, step: Step, *, source: Path, model: Path
) -> SessionPlan | None:
    """Returns the session that optimises the source and writes it, None for a step that takes it as it is.

    The user's session entries are in force, since some of them are about optimisation. Only the device of
    the CUDA options is: `prefer_nhwc` would be baked into the file, and the others act in runs. Weights are
    not prepacked: that changes no byte of what is written and takes memory (1.1 GB at the peak instead of 1.6
    for VGG-19's 575 MB), unless the user wants the packed form saved too.

    Args:
        runtime: The user's options.
        variant: `cpu`, `cuda` or `portable`.
        step: The step that writes the file.
        source: The model that is read.
        model: The file that is written; its data comes to lie beside it.
    """
    if step.level is None:
        return None
    options = loading_options(runtime, level=step.level)
    entries = dict(options.config_entries)
    if entries.get(_SAVE_PREPACKED) != "1":
        entries[_DISABLE_PREPACKING] = "1"
    entries |= with_external_data(model)
    return SessionPlan(
        model=str(source),
        session_options=options._replace(
            attributes={**options.attributes, "optimized_model_filepath": str(model)},
            config_entries=entries,
        ),
        providers=tuple(
            provider._replace(options={k: v for k, v in provider.options.items() if k == "device_id"})
            for provider in loading_providers(runtime, variant)
        ),
    )


def with_external_data(model: Path) -> dict[str, str]:
    """Returns the session entries that write large weights into a file beside the written model."""
    # A name, not a path: it is taken as relative to the written model, and stands so in it.
    return {_DATA_FILE: f"{model.name}.data", _DATA_MIN_BYTES: str(MIN_EXTERNAL_BYTES)}


Candidate = tuple[Path, Variant]
"""One way to load the model: the folder with every file that its session reads, and how it is loaded."""


def device_of(variant: Variant) -> str:
    """Returns the device that a variant runs on: `cpu` or `cuda:<index>`."""
    ordinals = [one.options.get("device_id", "0") for one in variant.providers if one.name == CUDA]
    return f"cuda:{ordinals[0]}" if ordinals else CPU_DEVICE


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
