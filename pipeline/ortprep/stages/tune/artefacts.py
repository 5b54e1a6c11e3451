"""Files of a plan: the verified graph, other levels, and other forms of each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.atomic import new_folder
from ortprep.bundle.loader_config import VersionRange
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.children.child import run_child
from ortprep.errors import PipelineError, StageError
from ortprep.options import with_external_data
from ortprep.runtime.loading.session import CPU, build_session
from ortprep.stages.core.contract import Context
from ortprep.stages.optimize.attempt import (
    describe_findings,
    model_name,
    role_of,
    save_and_describe,
    try_step,
)
from ortprep.stages.optimize.graph_writer import SaveResult
from ortprep.stages.optimize.lint import errors_of
from ortprep.stages.optimize.session_plans import loading_providers, plan_steps
from ortprep.tuning.knobs import MAPPED, ORT, PREPACKED

_PREPACKED_ENTRY = "session.save_external_prepacked_constant_initializers"


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

    def __init__(self, context: Context, prepared: Path, level: str, scratch: Path) -> None:
        self._context, self._prepared, self._level, self._scratch = context, prepared, level, scratch
        self._model = model_name(context.spec)
        self._made: dict[tuple[str, str], Artefact | PipelineError] = {}

    def get(self, form: str, level: str) -> Artefact:
        """Returns the files of a form and level.

        Raises:
            StageError: They cannot be made, or what was made is not safe to use.
            PipelineError: Anything else that keeps ONNX Runtime from writing them.
        """
        key = (form, level)
        if key not in self._made:
            try:
                self._made[key] = self._find(form, level)
            except PipelineError as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, PipelineError):
            raise made
        return made

    def _find(self, form: str, level: str) -> Artefact:
        """Returns the verified files, or writes those of another form or level."""
        if form == MAPPED and level == self._level:
            saved, _ = save_and_describe(self._context, self._prepared, None)
            return Artefact(self._prepared, self._model, saved, form)
        self._context.say(f"writing {form}, {level}")
        folder = self._scratch / f"{form}-{level}"
        with new_folder(folder) as temporary:
            if form == MAPPED:
                saved = _write_level(dataclasses.replace(self._context, folder=temporary), level)
            else:
                saved = _write_form(self._context, temporary.resolve(), form, self.get(MAPPED, level))
        name = Path(self._model).with_suffix(".ort").name if form == ORT else self._model
        return Artefact(folder, name, saved, form)


def _write_level(context: Context, level: str) -> SaveResult:
    """Writes the graph into the context's folder, at another level."""
    optimize = context.spec.optimize
    steps = plan_steps(role_of(context), level="all", disabled_optimizers=optimize.disabled_optimizers)
    step = next((step for step in steps if step.name == level), None)
    if step is None:
        raise StageError(f"no such level: {level!r}")
    attempt, saved = try_step(context, step)
    if saved is None:
        raise StageError(f"level {level!r} failed: {attempt.outcome}")
    return saved


def _write_form(context: Context, folder: Path, form: str, mapped: Artefact) -> SaveResult:
    """Writes a mapped graph into a folder, in another form, and returns what was found in it."""
    target, plan = folder / mapped.model, None
    if form == PREPACKED:
        plan = _prepacking_plan(context, mapped.path, target)
    else:
        run_child(write_form, (mapped.path, target, form), timeout_s=context.spec.optimize.timeout_s)
    if form == ORT:
        # Nothing but ONNX Runtime reads the format, and only the version that wrote it is known to.
        return mapped.saved
    saved, _ = save_and_describe(context, folder, plan)
    if errors := errors_of(saved.findings):
        raise StageError(f"what was written is not safe to use\n  {describe_findings(errors)}")
    return saved


def _prepacking_plan(context: Context, source: Path, model: Path) -> SessionPlan:
    """Returns the session that writes a prepared graph with prepacked copies of its weights."""
    options = SessionOptionsRecord(
        "ORT_DISABLE_ALL",
        attributes={"optimized_model_filepath": str(model)},
        config_entries={_PREPACKED_ENTRY: "1", **with_external_data(model)},
    )
    return SessionPlan(str(source), options, loading_providers(context.spec.runtime, role_of(context)))


def write_form(request: tuple[Path, Path, str]) -> None:
    """Child function: writes a mapped model (the first path) to the second, in the form `inline` or `ort`.

    Raises:
        LoadError: ONNX Runtime refuses the model.
    """
    source, written, form = request
    if form == ORT:
        entries = {"session.save_model_format": "ORT", "session.disable_prepacking": "1"}
        attributes = {"optimized_model_filepath": str(written.with_suffix(".ort"))}
        options = SessionOptionsRecord("ORT_DISABLE_ALL", attributes=attributes, config_entries=entries)
        build_session(SessionPlan(str(source), options, (ProviderRecord(CPU),)))
        return
    import onnx

    from ortprep.stages.core.graphs.graph_walk import load_with_weights

    # ONNX Runtime would leave weights in the source's file, under the name that they have beside it.
    onnx.save(load_with_weights(source), written)


def readable_by(artefact: Artefact, versions: VersionRange) -> VersionRange:
    """Returns the ONNX Runtime versions that read an artefact, given those that read its graph."""
    if artefact.form != ORT:
        return versions
    major, minor, *_ = artefact.saved.onnxruntime.split(".")
    return VersionRange(f"{major}.{minor}", f"{major}.{int(minor) + 1}")
