"""Writes a spec for each model that an application was seen to load."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ortprep.adopt.model_use import ModelUse, merge_uses
from ortprep.adopt.observation import ModelRecord, ProcessRecord
from ortprep.adopt.spec_options import SpecOptions, options_of
from ortprep.bundle.digest import DigestCache
from ortprep.errors import PipelineError
from ortprep.init import find_spec_name, init_spec
from ortprep.options import NEWEST
from ortprep.stages.fetch.external_data import digest_beside
from ortprep.stages.fetch.inspection import inspect_file
from ortprep.versions import installed_onnxruntime

MODELS_FOLDER = "models"
"""Folder, beside the specs, of models that the application had as bytes."""

_PACKAGES = frozenset({"site-packages", "dist-packages"})
_NAMELESS = frozenset({"inference", "model", "model_optimized", "model_quantized"})
_WIDTH = 108


@dataclass(frozen=True)
class AdoptedModel:
    """What came of one model.

    Attributes:
        model: Its file; what is known of it if there is none.
        use: How the application uses it.
        name: Name of the spec; None if there is none.
        is_new: Whether the spec was written now; False for one that was there and was left as it is.
        problem: Why there is no spec, or what is wrong with it; "" for nothing.
        left_out: Options of the application that the spec does not keep.
    """

    model: str
    use: ModelUse
    name: str | None
    is_new: bool
    problem: str
    left_out: tuple[str, ...]


def adopt_models(
    processes: Sequence[ProcessRecord],
    records: Path,
    folder: Path,
    *,
    force: bool = False,
    say: Callable[[str], None] = lambda _line: None,
) -> tuple[AdoptedModel, ...]:
    """Writes the specs and returns what came of each model, in the order of their first session.

    Args:
        processes: What was recorded.
        records: Folder of the records, with the models that were given as bytes.
        folder: Where specs are written.
        force: Whether to replace specs that are there.
        say: Takes what is going on.

    Raises:
        OSError: There is no room for what is written.
    """
    models: list[AdoptedModel] = []
    for model, problem, use in _find_models(processes, records):
        options = options_of(use, version=installed_onnxruntime() or NEWEST)
        if model is None:
            models.append(AdoptedModel(_describe(use.model), use, None, False, problem, options.left_out))
            continue
        try:
            models.append(
                _adopt(model, use, options, folder, program=processes[0].program, force=force, say=say)
            )
        except PipelineError as error:
            models.append(AdoptedModel(str(model), use, None, False, error.message, options.left_out))
    return tuple(models)


def _find_models(
    processes: Sequence[ProcessRecord], records: Path
) -> Iterator[tuple[Path | None, str, ModelUse]]:
    """Yields the file of each model, or why it has none, and how it is used.

    Equal files are one model, external data included.
    """
    groups: dict[str, list[tuple[Path | None, str, ModelRecord]]] = {}
    cache = DigestCache()
    for record in (model for process in processes for model in process.models):
        path, problem = _locate(record, records)
        key = repr(record.path) if path is None else _digest(path, cache)
        groups.setdefault(key, []).append((path, problem, record))
    for group in groups.values():
        # A file of the application's own is upgraded with it, unlike a copy of bytes.
        path, problem, _ = min(group, key=lambda entry: entry[2].path is None)
        yield path, problem, merge_uses([record for _, _, record in group], ids=_find_ids(path))


def _find_ids(model: Path | None) -> Collection[str]:
    """Returns the inputs of a model that index a table; none if the model cannot be read."""
    if model is None:
        return ()
    with suppress(PipelineError):  # `init_spec` says what is wrong with it
        return tuple(inspect_file(model, name=model.name).interface.index_bounds)
    return ()


def _digest(model: Path, cache: DigestCache) -> str:
    digest = cache.digest(model)
    return repr((digest, sorted(digest_beside(model, digest, cache).items())))


def _locate(record: ModelRecord, records: Path) -> tuple[Path | None, str]:
    """Returns the model's file, or None and the reason."""
    if record.path is None:
        path = None if record.saved is None else records / Path(record.saved).name
        return path, "" if path is not None else "given as bytes, and too large to keep"
    path = Path(record.path)
    if path.suffix == ".ort":
        return None, "in ONNX Runtime's own format; prepare the ONNX file that it was made from"
    try:
        status = path.stat()
    except OSError as error:
        return None, f"can no longer be read: {error.strerror}"
    if (status.st_size, status.st_mtime_ns) != (record.size_bytes, record.modified_ns):
        return None, "changed since the application loaded it"
    return path, ""


def _describe(model: ModelRecord) -> str:
    return model.path or f"{model.size_bytes} bytes"


def _adopt(
    model: Path,
    use: ModelUse,
    options: SpecOptions,
    folder: Path,
    *,
    program: str,
    force: bool,
    say: Callable[[str], None],
) -> AdoptedModel:
    if use.model.path is None:
        model = _keep(model, folder)
    existing_name = find_spec_name(model, folder)
    if existing_name is not None and not force:
        return AdoptedModel(str(model), use, existing_name, False, "", options.left_out)
    observed = {name: record for name, record in use.inputs.items() if name in use.model.inputs}
    result = init_spec(
        model,
        folder=folder,
        name=existing_name or _name(model, folder),
        observed=observed,
        sections=options.sections,
        say=say,
    )
    text = "\n".join([*_header(use, options, program), result.text])
    replace(result, text=text).write(force=force)
    problem = "" if result.question is None else f"did not run: {result.question.text}"
    return AdoptedModel(str(model), use, result.spec.name, True, problem, options.left_out)


def _keep(saved: Path, folder: Path) -> Path:
    """Copies a model that was given as bytes beside the specs."""
    copy = folder / MODELS_FOLDER / f"model-{saved.stem[:12]}.onnx"
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(saved, copy)
    return copy


def _name(model: Path, folder: Path) -> str | None:
    """Returns the package's name for a `model.onnx` in it; None where a file's own name says enough."""
    parts = model.parts
    package = next((parts[i + 1] for i, part in enumerate(parts[:-2]) if part in _PACKAGES), None)
    if package is None or model.stem not in _NAMELESS:
        return None
    return package if not (folder / f"{package}.yaml").exists() else f"{package}-{model.parent.name}"


def _header(use: ModelUse, options: SpecOptions, program: str) -> Iterator[str]:
    seen = f"sessions {use.loads}, runs {use.runs}, sets of shapes {use.shape_count}"
    lines = [
        f"Adopted from `{program}`: {seen}. The options in `runtime` are the application's own, and are "
        "not tuned. If sessions run more often in production, raise tune.runs_per_load."
    ]
    if use.other_options:
        other = "1 other set" if use.other_options == 1 else f"{use.other_options} other sets"
        lines.append(f"Also seen with {other} of options; these are the ones with the most runs.")
    lines += [f"Not kept: {item}" for item in options.left_out]
    for line in lines:
        printable = "".join(item if item.isprintable() else " " for item in line)
        yield from (f"# {part}" for part in textwrap.wrap(printable, _WIDTH))
