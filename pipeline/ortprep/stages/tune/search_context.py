"""Space, objective, plans and processes of one search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ortprep.bundle.atomic import new_folder
from ortprep.bundle.loader_config import VersionRange
from ortprep.bundle.model_facts import ModelFacts
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.children.answers import Answer
from ortprep.children.child import run_child
from ortprep.children.probe import ProbeResult
from ortprep.errors import PipelineError
from ortprep.measuring.device_lock import working
from ortprep.measuring.staged_bundles import StagedBundles
from ortprep.options import format_option
from ortprep.runtime.loading.session import CPU, build_session
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.machine.memory import available_bytes
from ortprep.stages.core.accuracy import convert_section
from ortprep.stages.core.contract import Context
from ortprep.stages.core.results import PreparedResult, read_optimized, read_source, session_of
from ortprep.stages.optimize.graph_writer import SaveResult
from ortprep.stages.optimize.session_plans import (
    SOURCE,
    Candidate,
    default_candidate,
    loading_options,
    loading_providers,
    with_external_data,
)
from ortprep.stages.optimize.stage import (
    model_name,
    requirements_of,
    role_of,
    save_and_describe,
)
from ortprep.stages.verify.reference import (
    ReferenceAnswers,
    judging,
    read_shared_reference,
)
from ortprep.tuning.objective import Objective
from ortprep.tuning.space import (
    DEFAULT,
    FORM,
    MAPPED,
    ORT,
    Conditions,
    PlanChoice,
    Space,
    build_space,
)
from ortprep.tuning.trial import TrialRequest, measure_trial

Check = tuple[str, tuple[Answer, ...]]
"""File of an input, and the source's answers to it."""


@dataclass(frozen=True)
class SearchContext:
    """Everything one target's search needs.

    Attributes:
        reference: All samples that judge, and the source's answers.
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
    checks: tuple[Check, ...]
    staged: StagedBundles

    def load(self, choice: PlanChoice) -> Candidate:
        """Returns how a plan is loaded, as the bundle would record it; makes its files if needed.

        Raises:
            PipelineError: They cannot be made.
        """
        if choice == DEFAULT:
            return self.default
        artefact, runtime = self.artefacts.get(choice[FORM]), self.context.spec.runtime
        level = self.optimized.variant.session_options.graph_optimization_level
        options, providers = self.space.apply(
            choice,
            loading_options(runtime, level=level),
            loading_providers(runtime, self.context.target),
        )
        needs = requirements_of(self.context, artefact.saved, options, providers)
        variant = self.optimized.variant._replace(
            model=artefact.model,
            session_options=options,
            providers=providers,
            requirements=needs._replace(onnxruntime=readable_by(artefact, needs.onnxruntime)),
        )
        return artefact.folder, variant

    def measure(self, choice: PlanChoice, *, timeout_s: float | None = None) -> ProbeResult:
        """Measures a choice once, in a process of its own.

        Raises:
            PipelineError: The plan failed, and this is why.
        """
        spec, (folder, variant), bundle = self.context.spec, self.load(choice), None
        timeout_s = timeout_s or spec.tune.timeout_s
        if choice != DEFAULT or self.context.tunes_forks:
            bundle = str(self.staged.stage(folder, variant, timeout_s=timeout_s))
        (first, *more), answers = zip(*self.checks, strict=True)
        is_gated = self.context.variant_plan.has_own_precision
        request = TrialRequest(
            plan=session_of(folder, variant),
            bundle=bundle,
            sample=first,
            more_samples=tuple(more),
            steady_s=spec.tune.steady_s,
            forked=self.context.tunes_forks,
            answers=answers,
            tolerances=spec.verify.tolerances(self.reference.noise),
            gate=convert_section(spec).thresholds(of_all=False) if is_gated else None,
        )
        memory_bytes = None if self.context.target == "cuda" else available_bytes()
        return measure_trial(request, timeout_s=timeout_s, memory_bytes=memory_bytes)


@contextmanager
def open_search(context: Context) -> Iterator[SearchContext]:
    """Yields what a search works with, while its files and staged bundles exist.

    Raises:
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
    every = read_shared_reference(context)
    reference = judging(every, graph)
    artefacts = Artefacts(context, folder, scratch / "forms")
    facts = artefacts.get(MAPPED).saved.facts
    fixed_shapes = len({sample.shapes for sample in every.samples}) == 1
    return SearchContext(
        context=context,
        optimized=optimized,
        space=_space(context, facts, optimized, fixed_shapes=fixed_shapes),
        objective=Objective.of(
            context.spec.tune, first_phase=context.spec.tune.first_phase and not context.tunes_forks
        ),
        artefacts=artefacts,
        reference=reference,
        default=default_candidate(context, context.variant_plan),
        checks=checked_samples(every, reference),
        staged=StagedBundles(
            scratch / "staged", graph.description.interface.inputs, graph.description.interface.outputs
        ),
    )


def _space(context: Context, facts: ModelFacts, optimized: PreparedResult, *, fixed_shapes: bool) -> Space:
    """Returns the plans that can differ on this machine, without what the spec has set."""
    runtime = context.spec.runtime
    conditions = Conditions(
        target=context.target,
        onnxruntime=optimized.onnxruntime,
        cores=read_hardware(gpus=False).cores,
        is_source=optimized.step == SOURCE,
        fixed_shapes=fixed_shapes,
        fixed={
            name: format_option(value)
            for name, value in {**runtime.session_config, **runtime.cuda, **runtime.attributes}.items()
        }
        | ({"intra_op_num_threads": "1"} if context.tunes_forks else {}),
    )
    return build_space(facts, conditions)


def checked_samples(every: ReferenceAnswers, judging: ReferenceAnswers) -> tuple[Check, ...]:
    """Returns one sample per set of shapes: one that judges, if there is one."""
    first: dict[str, Check | None] = dict.fromkeys(sample.shapes for sample in every.samples)
    for part in (judging, every):
        for sample, answers in zip(part.samples, part.answers.samples, strict=True):
            first[sample.shapes] = first[sample.shapes] or (sample.file, answers)
    return tuple(check for check in first.values() if check is not None)


@dataclass(frozen=True)
class Artefact:
    """Files that a session is made from, alone in their folder."""

    folder: Path
    model: str
    saved: SaveResult
    form: str

    @property
    def path(self) -> Path:
        """The model file."""
        return self.folder / self.model


class Artefacts:
    """Makes each artefact once, in a folder of its own below `scratch`."""

    def __init__(self, context: Context, prepared: Path, scratch: Path) -> None:
        self._context, self._prepared, self._scratch = context, prepared, scratch
        self._model = model_name(context.spec)
        self._made: dict[str, Artefact | PipelineError] = {}

    def get(self, form: str) -> Artefact:
        """Returns the files of a form.

        Raises:
            PipelineError: They cannot be made.
        """
        if form not in self._made:
            try:
                self._made[form] = self._find(form)
            except PipelineError as error:
                self._made[form] = error
        made = self._made[form]
        if isinstance(made, PipelineError):
            raise made
        return made

    def _find(self, form: str) -> Artefact:
        """Returns the verified files, or writes those of another form."""
        if form == MAPPED:
            saved = save_and_describe(self._context, self._prepared, None)
            return Artefact(self._prepared, self._model, saved, form)
        self._context.say(f"writing {form}")
        folder = self._scratch / form
        with new_folder(folder) as temporary:
            saved = _write_form(self._context, temporary.resolve(), form, self.get(MAPPED))
        name = Path(self._model).with_suffix(".ort").name if form == ORT else self._model
        return Artefact(folder, name, saved, form)


def _write_form(context: Context, folder: Path, form: str, mapped: Artefact) -> SaveResult:
    """Writes a mapped graph into a folder, in another form, and returns what was found in it."""
    target = folder / mapped.model
    if form == ORT:
        run_child(write_ort, (mapped.path, target), timeout_s=context.spec.optimize.timeout_s)
        # Nothing but ONNX Runtime reads the format, and only the version that wrote it is known to.
        return mapped.saved
    entries = {"session.save_external_prepacked_constant_initializers": "1", **with_external_data(target)}
    options = SessionOptionsRecord("ORT_DISABLE_ALL", {"optimized_model_filepath": str(target)}, entries)
    providers = loading_providers(context.spec.runtime, role_of(context))
    return save_and_describe(context, folder, SessionPlan(str(mapped.path), options, providers))


def write_ort(request: tuple[Path, Path]) -> None:
    """Child function: writes a mapped model, the first path, in ONNX Runtime's format, beside the second.

    Raises:
        LoadError: ONNX Runtime refuses the model.
    """
    source, written = request
    entries = {"session.save_model_format": "ORT", "session.disable_prepacking": "1"}
    attributes = {"optimized_model_filepath": str(written.with_suffix(".ort"))}
    options = SessionOptionsRecord("ORT_DISABLE_ALL", attributes, entries)
    build_session(SessionPlan(str(source), options, (ProviderRecord(CPU),)))


def readable_by(artefact: Artefact, versions: VersionRange) -> VersionRange:
    """Returns the ONNX Runtime versions that read an artefact, given those that read its graph."""
    if artefact.form != ORT:
        return versions
    major, minor, *_ = artefact.saved.onnxruntime.split(".")
    return VersionRange(f"{major}.{minor}", f"{major}.{int(minor) + 1}")
