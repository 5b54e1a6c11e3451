"""Space, objective, plans and processes of one search."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ortprep.bundle.model_facts import ModelFacts
from ortprep.children.probe import ProbeResult
from ortprep.errors import SpecError, StageError
from ortprep.measuring.device_lock import working
from ortprep.measuring.staged_bundles import StagedBundles
from ortprep.options import format_option
from ortprep.quoting import quoted
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.machine.process_memory import available_bytes
from ortprep.spec.models import ModelSpec, TuneSpec
from ortprep.stages.core.accuracy import convert_section
from ortprep.stages.core.contract import Context, TaskId
from ortprep.stages.core.results import PreparedResult, session_of
from ortprep.stages.core.sources import read_optimized, read_source
from ortprep.stages.measure.candidates import Candidate, default_candidate, device_of
from ortprep.stages.optimize.attempt import requirements_of
from ortprep.stages.optimize.lint import NCHWC_DOMAIN
from ortprep.stages.optimize.session_plans import (
    ALL,
    ALL_REDUCED,
    EXTENDED,
    SOURCE,
    loading_options,
    loading_providers,
)
from ortprep.stages.tune.artefacts import Artefacts, readable_by
from ortprep.stages.verify.reference import ReferenceAnswers, fitting, read_reference, reference_variant
from ortprep.tuning.knobs import (
    FORM,
    LEVEL,
    MAPPED,
    Conditions,
    build_space,
    needs_binding,
    restrict,
)
from ortprep.tuning.objective import Objective
from ortprep.tuning.space import DEFAULT, PlanChoice, Space
from ortprep.tuning.trial import CheckedSample, TrialRequest, measure_trial


@dataclass(frozen=True)
class SearchContext:
    """Everything one target's search needs.

    Attributes:
        reference: All samples, and the source's answers.
        default: The source in plain ONNX Runtime, which cannot be chosen.
        checks: The inputs that plans are measured on, and the source's answers: one of each shape.
        staged: Bundles that the plans are loaded from.
    """

    context: Context
    optimized: PreparedResult
    space: Space
    objective: Objective
    artefacts: Artefacts
    reference: ReferenceAnswers
    default: Candidate
    checks: tuple[CheckedSample, ...]
    staged: StagedBundles

    @property
    def device(self) -> str:
        """The device that plans are measured on."""
        return device_of(self.default[1])

    @property
    def tune(self) -> TuneSpec:
        """The spec's section."""
        return self.context.spec.tune

    def load(self, choice: PlanChoice) -> Candidate:
        """Returns how a plan is loaded, as the bundle would record it; makes its files if needed.

        Raises:
            PipelineError: They cannot be made.
        """
        if choice == DEFAULT:
            return self.default
        artefact, runtime = self.artefacts.get(choice[FORM], choice[LEVEL]), self.context.spec.runtime
        level = "ORT_ENABLE_ALL" if choice[LEVEL] == SOURCE else "ORT_DISABLE_ALL"
        options, providers = self.space.apply(
            choice,
            loading_options(runtime, level=level),
            loading_providers(runtime, self.context.target),
        )
        needs = requirements_of(self.context, artefact.saved, options, providers)
        variant = dataclasses.replace(
            self.optimized.variant,
            model=artefact.model,
            session_options=options,
            providers=providers,
            requirements=dataclasses.replace(needs, onnxruntime=readable_by(artefact, needs.onnxruntime)),
            io_binding=needs_binding(choice),
        )
        return artefact.folder, variant

    def measure(self, choice: PlanChoice, *, timeout_s: float | None = None) -> ProbeResult:
        """Measures a choice once, in a process of its own.

        Raises:
            PipelineError: The plan failed, and this is why.
        """
        spec, (folder, variant), bundle = self.context.spec, self.load(choice), None
        timeout_s = timeout_s or self.tune.timeout_s
        if choice != DEFAULT:
            bundle = str(self.staged.stage(folder, variant, timeout_s=timeout_s))
        is_gated = self.context.variant_plan.has_own_precision
        request = TrialRequest(
            plan=session_of(folder, variant),
            bundle=bundle,
            sample=self.checks[0].file,
            more_samples=tuple(check.file for check in self.checks[1:]),
            steady_s=self.tune.steady_s,
            io_binding=variant.io_binding,
            checks=self.checks,
            tolerances=spec.verify.tolerances(self.reference.noise),
            gate=convert_section(spec).thresholds(of_all=False) if is_gated else None,
        )
        memory_bytes = None if self.context.target == "cuda" else available_bytes()
        return measure_trial(request, timeout_s=timeout_s, memory_bytes=memory_bytes)


@contextmanager
def open_search(context: Context) -> Iterator[SearchContext]:
    """Yields what a search works with, while its files and staged bundles exist.

    Raises:
        SpecError: The spec weighs other shapes than there are.
        PipelineError: The prepared graph cannot be read.
    """
    with TemporaryDirectory(prefix=".plans-", dir=context.folder) as scratch:
        with working():
            search_context = _build_search_context(context, Path(scratch).resolve())
        yield search_context


def _build_search_context(context: Context, scratch: Path) -> SearchContext:
    """Reads what earlier stages left, and derives the search space from it."""
    optimized, folder = read_optimized(context, context.variant)
    graph = read_source(context)
    if not (folder / optimized.variant.model).is_file():
        raise StageError(
            f"files of optimize/{context.variant} of {context.spec.name} are gone: {folder}",
            hint=f"ortprep prepare {quoted(context.spec.name)}",
        )
    every = read_reference(context.upstream[TaskId("verify", reference_variant(context.plan))].folder)
    reference = fitting(every, graph.description.interface, f"{context.spec.name}/{context.variant}")
    artefacts = Artefacts(context, folder, optimized.step, scratch / "forms")
    facts = artefacts.get(MAPPED, optimized.step).saved.facts
    fixed_shapes = len({sample.shapes for sample in reference.samples}) == 1
    return SearchContext(
        context=context,
        optimized=optimized,
        space=_space(context, facts, optimized, fixed_shapes=fixed_shapes),
        objective=Objective.of(context.spec.tune),
        artefacts=artefacts,
        reference=reference,
        default=default_candidate(context, context.variant_plan),
        checks=_checked_samples(context.spec, every, reference),
        staged=StagedBundles(
            scratch / "staged", graph.description.interface.inputs, graph.description.interface.outputs
        ),
    )


def _space(context: Context, facts: ModelFacts, optimized: PreparedResult, *, fixed_shapes: bool) -> Space:
    """Returns the plans that can differ on this machine, as far as the spec allows them."""
    runtime, target = context.spec.runtime, context.target
    conditions = Conditions(
        target=target,
        onnxruntime=optimized.onnxruntime,
        cores=read_hardware(gpus=False).cores,
        levels=_levels(facts, optimized.step, target=target),
        fixed_shapes=fixed_shapes,
        allowed=context.spec.tune.allow,
        fixed={
            name: format_option(value)
            for name, value in {**runtime.session_config, **runtime.cuda, **runtime.attributes}.items()
        },
    )
    return restrict(build_space(facts, conditions), context.spec.tune.space)


def _levels(facts: ModelFacts, step: str, *, target: str) -> tuple[str, ...]:
    """Returns the levels worth comparing: without a layout in the graph they are equal."""
    if step != ALL:
        return (step,)
    if target == "cuda":
        return (ALL, EXTENDED) if facts.has_convolutions else (ALL,)
    return (ALL, ALL_REDUCED, EXTENDED) if NCHWC_DOMAIN in facts.domains else (ALL,)


def _checked_samples(
    spec: ModelSpec, every: ReferenceAnswers, fitting: ReferenceAnswers
) -> tuple[CheckedSample, ...]:
    """Returns one sample per set of shapes."""
    shapes = tuple(dict.fromkeys(sample.shapes for sample in every.samples))
    weights = spec.tune.shape_weights or (1.0,) * len(shapes)
    if len(weights) != len(shapes):
        raise SpecError(
            f"tune.shape_weights does not fit the declared shapes: {spec.name}\n"
            f"  expected {len(shapes)} weights ({'; '.join(shapes)}), got {len(weights)}"
        )
    weight_of = dict(zip(shapes, weights, strict=True))
    first = {
        sample.shapes: CheckedSample(sample.file, answers, weight_of[sample.shapes])
        for sample, answers in reversed(tuple(zip(fitting.samples, fitting.answers.samples, strict=True)))
    }
    chosen = tuple(first[shape] for shape in shapes if shape in first)
    # What is never sent to the model at large may be all that is sent to a bucket.
    sent = any(sample.weight for sample in chosen)
    return chosen if sent else tuple(dataclasses.replace(sample, weight=1.0) for sample in chosen)
