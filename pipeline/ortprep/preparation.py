"""The build as a function: `from ortprep import prepare`, in the calling process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortprep.build.build_plan import check_buildable, plan_specs
from ortprep.build.observers import BuildEvent, Observer
from ortprep.build.runner import run_builds
from ortprep.children.availability import unavailable_reason
from ortprep.errors import SourceError, SpecError
from ortprep.init import find_spec_name, init_spec
from ortprep.spec.models import ModelSpec
from ortprep.spec.reading import make_spec, override, read_spec, read_specs
from ortprep.stages.fetch.stage import local_source


def prepare(
    model: str | os.PathLike[str],
    *,
    name: str | None = None,
    artifacts: str | os.PathLike[str] = "artifacts",
    configs: str | os.PathLike[str] = "configs",
    target: str | None = None,
    on_progress: Observer | None = None,
    **sections: Any,
) -> Path:
    """Prepares a model, as `ortprep prepare` does, and returns the absolute path of its bundle.

    It only runs tasks that are not up to date: the command line, doit and this function share receipts. It
    blocks the calling thread until the bundle is ready, and writes nothing to stdout or stderr. In asyncio
    code, use `await asyncio.to_thread(prepare, …)`.

    Args:
        model: A spec's file (`configs/net.yaml`, over the `defaults.yaml` beside it), or a model's path or
            URL.
        name: Name of the bundle; by default the spec's, else that of the model's file.
        artifacts: Folder of bundles.
        configs: Folder of specs. For a model's path without `inputs` and `samples`, the spec is looked up
            there; if there is none, it is drafted and written, as `ortprep init` does.
        target: Build only this target: `cpu` or `cuda`.
        on_progress: Called with every `BuildEvent`; an exception that it raises ends the build.
        sections: Sections of a spec (`inputs`, `tune`, `convert`, …), merged over those of the spec's file,
            which is not changed.

    Raises:
        SourceError: There is no such model; nothing was started.
        SpecError: The spec is wrong, a target is not available, or no inputs were found that the model runs
            on; nothing was started.
        PipelineError: A task failed; an old bundle, if any, is untouched.
    """
    _require_local(artifacts=artifacts, configs=configs)
    report = on_progress or (lambda _: None)
    spec = _find_spec(model, name, Path(configs), report, sections)
    folder = Path(artifacts).absolute()
    check_buildable((spec,), folder)
    unavailable_reason.cache_clear()  # in a notebook, hours later, a GPU may have room again
    (tasks,) = plan_specs((spec,), folder, only=target)
    for error in run_builds((tasks,), report):
        raise error
    return tasks[-1].folder


def _require_local(**folders: str | os.PathLike[str]) -> None:
    """Raises `SpecError` for a URL, which would become the name of a folder."""
    for argument, folder in folders.items():
        if "://" in os.fspath(folder):
            raise SpecError(
                f"bad argument of prepare: {argument}\n  expected a folder on this machine, got a URL",
                hint='prepare("model.onnx", configs="configs", artifacts="artifacts")',
            )


def _find_spec(
    model: str | os.PathLike[str],
    name: str | None,
    configs: Path,
    report: Observer,
    sections: Mapping[str, Any],
) -> ModelSpec:
    """Returns the spec that the arguments of `prepare` name, drafted if there is none."""
    own = {**({} if name is None else {"name": name}), **sections}
    text = os.fspath(model)
    if text.lower().endswith((".yaml", ".yml")) and "://" not in text:
        return override(read_spec(Path(text).absolute()), own)
    spec = make_spec(text, name=name, sections=sections)
    path = local_source(spec)
    if path is not None and not path.is_file():
        got = "a folder" if path.is_dir() else "none"
        raise SourceError(
            f"no such model: {text}\n  expected a URL or an ONNX file, got {got} at {path.absolute()}",
            hint='prepare("path/of/model.onnx")',
        )
    if path is None or sections.keys() & {"inputs", "samples"}:
        return spec
    return override(_find_drafted(path, name, configs, report), own)


def _find_drafted(model: Path, name: str | None, configs: Path, report: Observer) -> ModelSpec:
    """Returns the spec that a folder has for a model, or writes one."""
    existing_name = find_spec_name(model, configs)
    if existing_name is not None and name in (None, existing_name):
        return read_specs(configs, names=(existing_name,))[0]

    def say(line: str) -> None:
        report(BuildEvent("said", f"init:{model.stem}", line))

    drafted = init_spec(model, folder=configs, name=name, say=say, may_drop_zip_map=True)
    return read_spec(drafted.write().absolute())
