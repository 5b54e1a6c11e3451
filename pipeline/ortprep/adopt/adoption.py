"""Writes a spec for each model that an application was seen to load."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortprep.adopt.model_use import ModelUse, merge_uses, options_of
from ortprep.adopt.observation import ModelRecord, ProcessRecord
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.file_links import refuse_links
from ortprep.errors import PipelineError, SourceError
from ortprep.init import choose_name, find_spec_name, init_spec
from ortprep.init.draft import comment, refuse_specs_link
from ortprep.options import NEWEST
from ortprep.stages.core.spec_fit import MIN_AUTO_SAMPLES
from ortprep.stages.fetch.inspection import digest_beside
from ortprep.versions import installed_onnxruntime

SAMPLES_FOLDER = "samples"
"""Folder, beside the specs, of real inputs: a folder per spec."""

MODELS_FOLDER = "models"
"""Folder, beside the specs, of models that the application had as bytes."""

_PACKAGES = frozenset({"site-packages", "dist-packages"})
_NAMELESS = frozenset({"inference", "model", "model_optimized", "model_quantized"})


@dataclass(frozen=True)
class AdoptedModel:
    """What came of one model.

    Attributes:
        model: Its file; its size if the application gave bytes.
        use: How the application uses it.
        name: Name of the spec; None if there is none.
        is_new: Whether the spec was written now; False for one that was there and was left as it is.
        problem: Why there is no spec, or what is wrong with it; "" for nothing.
        left_out: Options of the application that the spec does not keep.
        samples: Number of real inputs that were kept for the spec.
    """

    model: str
    use: ModelUse
    name: str | None
    is_new: bool
    problem: str
    left_out: tuple[str, ...]
    samples: int = 0


def adopt_models(
    processes: Sequence[ProcessRecord],
    records: Path,
    folder: Path,
    *,
    force: bool = False,
    max_inputs: int = 0,
    convert: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> tuple[AdoptedModel, ...]:
    """Writes the specs and returns what came of each model, in the order of their first session.

    Args:
        processes: What was recorded.
        records: Folder of the records, with the models that were given as bytes.
        folder: Where specs are written.
        force: Whether to replace specs that are there.
        max_inputs: Maximum number of real inputs to keep for each spec, of those that were recorded.
        convert: Section `convert` of the specs, for models with at least two such inputs; None for none.
        say: Takes what is going on.

    Raises:
        SpecError: `folder` is the default one, and a link.
        OSError: There is no room for what is written.
    """
    refuse_specs_link(folder)
    adopted = []
    for group in _group_records(processes, records):
        # A file of the application's own is upgraded with it, unlike a copy of bytes.
        record = min(group, key=lambda one: one.path is None)
        use = merge_uses(group)
        sections, left_out = options_of(use, version=installed_onnxruntime() or NEWEST)
        is_written, name, problem, samples = False, None, "", 0
        try:
            model = _locate(record, records)
            if record.path is None:
                model = _keep(model, folder)
            name = find_spec_name(model, folder)
            if name is None or force:
                name = name or _name(model, folder) or choose_name(model, folder)
                chosen = _choose_samples(group, records, max_inputs)
                samples = _keep_samples(chosen, folder / SAMPLES_FOLDER / name, force=force)
                if samples:
                    sections["samples"] = f"{SAMPLES_FOLDER}/{name}/*.npz"
                if convert is not None:
                    _add_convert(convert, samples, sections, left_out)
                observed = {name: one for name, one in use.inputs.items() if name in use.model.inputs}
                result = init_spec(
                    model, folder=folder, name=name, observed=observed, sections=sections, say=say
                )
                text = "\n".join([*_header(use, left_out), result.text])
                replace(result, text=text).write(force=force)
                is_written = True
                problem = f"did not run: {result.question}" if result.question else ""
        except PipelineError as error:
            is_written, name, problem = False, None, error.message
        adopted.append(
            AdoptedModel(_describe(record), use, name, is_written, problem, tuple(left_out), samples)
        )
    return tuple(adopted)


def _add_convert(
    convert: Mapping[str, Any], samples: int, sections: dict[str, Any], left_out: list[str]
) -> None:
    """Adds the section `convert`, or why there is none: too few samples to calibrate and to judge."""
    if samples >= MIN_AUTO_SAMPLES:
        sections["convert"] = convert
    else:
        expected = f"expected at least {MIN_AUTO_SAMPLES} runs with arrays"
        left_out.append(f"precision: {expected}, got {samples}")


def _group_records(processes: Sequence[ProcessRecord], records: Path) -> Collection[list[ModelRecord]]:
    """Returns what was recorded of each model; equal files are one, external data included."""
    groups: dict[object, list[ModelRecord]] = {}
    cache = DigestCache()
    for record in (model for process in processes for model in process.models):
        key: object = record.path
        with suppress(PipelineError):
            path = _locate(record, records)
            digest = cache.digest(path)
            key = digest, tuple(sorted(digest_beside(path, cache).items()))
        groups.setdefault(key, []).append(record)
    return groups.values()


def _locate(record: ModelRecord, records: Path) -> Path:
    """Returns the file of a model, where it was given as bytes the one beside the records.

    Raises:
        SourceError: There is none any more, or none that a spec can name.
    """
    if record.path is None:
        return records / Path(record.saved or "").name
    path = Path(record.path)
    if path.suffix == ".ort":
        raise SourceError("in ONNX Runtime's own format; prepare the ONNX file that it was made from")
    try:
        status = path.stat()
    except OSError as error:
        raise SourceError(f"can no longer be read: {error.strerror}") from error
    if (status.st_size, status.st_mtime_ns) != (record.size_bytes, record.modified_ns):
        raise SourceError("changed since the application loaded it")
    return path


def _describe(model: ModelRecord) -> str:
    return model.path or f"{model.size_bytes} bytes"


def _keep(saved: Path, folder: Path) -> Path:
    """Copies a model that was given as bytes beside the specs, for this user alone: it may be a secret."""
    copy = folder / MODELS_FOLDER / f"model-{saved.stem[:12]}.onnx"
    refuse_links([copy.parent, copy])
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.touch(mode=0o600)
    copy.chmod(0o600)  # one of an earlier run may be there
    shutil.copyfile(saved, copy)
    return copy


def _choose_samples(group: Sequence[ModelRecord], records: Path, limit: int) -> Sequence[Path]:
    """Returns the files of recorded inputs of a model, at most a limit of them."""
    named = (records / Path(name).name for record in group for name in record.kept)
    files = [file for file in named if file.is_file()]
    count = min(limit, len(files))
    return [files[index * len(files) // count] for index in range(count)]  # from all over their order


def _keep_samples(chosen: Sequence[Path], folder: Path, *, force: bool) -> int:
    """Copies real inputs to where only this user and no commit of git reads them.

    They replace earlier ones. If there are none, a spec that `force` replaces keeps those that it has.

    Returns:
        The number of real inputs of the spec.
    """
    if not (chosen or force):
        return 0
    ignored = folder.parent / ".gitignore"
    refuse_links([folder.parent, folder, ignored])
    old = list(folder.glob("[0-9][0-9][0-9][0-9].npz"))
    if not chosen:
        return len(old)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ignored.write_text("*\n", encoding="utf-8")  # whatever one says that came with a clone
    for file in old:
        file.unlink()
    for number, file in enumerate(chosen):
        copy = folder / f"{number:04}.npz"
        copy.touch(mode=0o600, exist_ok=False)
        shutil.copyfile(file, copy)
    return len(chosen)


def _name(model: Path, folder: Path) -> str | None:
    """Returns the package's name for a `model.onnx` in it; None where a file's own name says enough."""
    parts = model.parts
    package = next((parts[i + 1] for i, part in enumerate(parts[:-2]) if part in _PACKAGES), None)
    if package is None or model.stem not in _NAMELESS:
        return None
    return package if not (folder / f"{package}.yaml").exists() else f"{package}-{model.parent.name}"


def _header(use: ModelUse, left_out: Sequence[str]) -> Iterator[str]:
    """Yields the comment lines at the head of a spec: what was seen, and what was left out."""
    lines = [
        f"Adopted from an application: sessions {use.loads}, runs {use.runs}, sets of shapes {use.shapes}. "
        "The options in `runtime` are the application's own, and are not tuned. If sessions run more often "
        "in production, raise tune.runs_per_load.",
        *(f"Not kept: {item}" for item in left_out),
    ]
    for line in lines:
        yield from comment(line)
