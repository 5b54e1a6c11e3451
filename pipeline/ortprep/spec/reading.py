"""Spec files: read, merged with `defaults.yaml`, validated; every problem of every file at once."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ortprep.bundle.paths import make_name
from ortprep.errors import SpecError, require_known
from ortprep.quoting import quoted
from ortprep.spec.models import ModelSpec
from ortprep.spec.urls import parse_hub_url
from ortprep.spec.validation import locate, parse_spec, validate
from ortprep.spec.yaml_text import Problem, YamlDocument, build_error, read_yaml
from ortprep.versions import installed_onnxruntime

DEFAULTS_FILE = "defaults.yaml"
"""Values for whatever the specs of the same folder leave out."""

OPEN_QUESTION = "# OPEN QUESTION:"
"""What the line begins with that says what `init` could not find out; a spec with it is refused."""


_OWN_KEYS = ("name", "source")
MAX_VALUES_OF_ALL = 500_000
"""Most values of all specs of a folder."""


def read_spec(path: Path) -> ModelSpec:
    """Reads one spec, over the `defaults.yaml` of its folder; relative paths in it start from there.

    Raises:
        SpecError: The file cannot be read or is wrong; the message lists every problem.
    """
    return _read_files([path], path.parent, ())[0]


def read_specs(folder: Path, *, names: Collection[str] = ()) -> tuple[ModelSpec, ...]:
    """Reads every `*.yaml` and `*.yml` of a folder, over its `defaults.yaml` if it has one.

    Args:
        folder: The folder; subfolders and hidden files are ignored.
        names: Models to read; none means all. Problems of other files are ignored.

    Returns:
        The specs in order of their files' names.

    Raises:
        SpecError: The folder has no spec, a name is unknown, two specs share a name, or files are wrong;
            the message lists every problem of every file.
    """
    return _read_files(_list_specs(folder), folder, names)


def _read_files(paths: Sequence[Path], folder: Path, names: Collection[str]) -> tuple[ModelSpec, ...]:
    """Reads specs over a folder's defaults; arguments and errors as of `read_specs`."""
    defaults = _read_defaults(folder)
    read, values = [], 0
    for path in paths:
        read.append(_read(path, defaults))
        values += len(read[-1][0].lines)
        if values > MAX_VALUES_OF_ALL:
            raise SpecError(
                f"too many specs: {folder}\n  expected at most {MAX_VALUES_OF_ALL} values in all of them",
                hint="ortprep prepare --configs DIR   # a folder with fewer",
            )
    if names:
        known = [_name_of(document) for document, _ in read]
        for name in names:
            require_known("model", name, known, hint=lambda near: f"ortprep prepare {quoted(near)}")
        read = [(document, spec) for document, spec in read if _name_of(document) in names]
    problems = [*defaults.problems, *(problem for document, _ in read for problem in document.problems)]
    problems += _find_namesakes([document for document, _ in read])
    if problems:
        raise build_error(problems)
    return tuple(spec for _, spec in read if spec is not None)


def list_sources(folder: Path) -> dict[str, ModelSpec | None]:
    """Returns specs of name and source alone for all specs in a folder, by name; None where these are wrong.

    Files that cannot be read, or are no specs, are left out; a folder that does not exist has none.
    """
    specs: dict[str, ModelSpec | None] = {}
    for document in map(read_yaml, _spec_files(folder) if folder.is_dir() else []):
        own = {key: document.data.get(key) for key in _OWN_KEYS}
        if isinstance(own["name"], str):
            spec, _ = validate(own, onnxruntime=None)
            specs[own["name"]] = None if spec is None else spec.located_in(folder)
    return specs


def _list_specs(folder: Path) -> list[Path]:
    """Lists the files of specs in a folder; raises `SpecError` if it has none."""
    try:
        paths = _spec_files(folder)
    except OSError as error:
        raise SpecError(
            f"cannot read the specs: {folder}\n  expected a folder, got: {error.strerror}",
            hint="ortprep prepare --configs DIR, or ortprep init MODEL.onnx, which writes a spec",
        ) from error
    if not paths:
        raise SpecError(
            f"no specs: {folder}\n  expected NAME.yaml files, got none", hint="ortprep init MODEL.onnx"
        )
    return paths


def _spec_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in (".yaml", ".yml") and path.name != DEFAULTS_FILE and not path.name.startswith(".")
    ]


def _read(path: Path, defaults: YamlDocument) -> tuple[YamlDocument, ModelSpec | None]:
    """Reads a file over the defaults; the document has all problems, and there is a spec if it has none."""
    document = read_yaml(path)
    if document.problems:
        return document, None
    spec, faults = validate(merge(defaults.data, document.data), onnxruntime=installed_onnxruntime())
    problems = (*_find_questions(document), *locate(faults, document, defaults))
    if spec is None or problems:
        return replace(document, problems=problems), None
    return document, spec.located_in(path.parent, file=path.name)


def _find_questions(document: YamlDocument) -> Iterator[Problem]:
    for number, line in enumerate(document.text.splitlines(), 1):
        if line.startswith(OPEN_QUESTION):
            question = line.removeprefix(OPEN_QUESTION).strip()
            yield Problem(
                document.file, number, (), f"answer this question, then delete the line: {question}"
            )


def _name_of(document: YamlDocument) -> str:
    """Returns the model's name, or the file's if it has none."""
    name = document.data.get("name")
    return name if isinstance(name, str) else Path(document.file).stem


def _read_defaults(folder: Path) -> YamlDocument:
    """Reads a folder's defaults; what is wrong in them shows, with their own file, in each spec over them."""
    path = folder / DEFAULTS_FILE
    document = read_yaml(path) if path.exists() else YamlDocument(str(path))
    stray = (((key,), "belongs in each model's own file") for key in _OWN_KEYS if key in document.data)
    data = {key: value for key, value in document.data.items() if key not in _OWN_KEYS}
    problems = (*document.problems, *locate(tuple(stray), document))
    return replace(document, data=data, problems=problems)


def _find_namesakes(documents: Sequence[YamlDocument]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for document in documents:
        name = document.data.get("name")
        if isinstance(name, str) and first.setdefault(name, document.file) != document.file:
            text = f"{name!r} is already the name of {first[name]}; expected another"
            yield Problem(document.file, document.line_of(("name",)), ("name",), text)


_HINT = (
    'prepare("net.onnx", inputs={"image": {"shapes": [[1, 3, 224, 224]]}}, tune={"budget_s": 60})'
    "   # ortprep schema: every key and what it takes"
)


def make_spec(source: str, *, name: str | None = None, sections: Mapping[str, Any]) -> ModelSpec:
    """Returns a spec of a model, with the content of a `configs/NAME.yaml`.

    Relative paths start from the working folder. Numpy's arrays and numbers, and paths, are accepted.

    Args:
        source: Path or URL of the model.
        name: Name of the bundle; by default that of the source's file.
        sections: The other sections: `inputs`, `tune`, `convert`, ….

    Raises:
        SpecError: Something is wrong; the message lists every problem.
    """
    kind = "url" if "://" in source else "path"
    data = {"name": name or _bundle_name(source), "source": {kind: source}, **sections}
    return _check(as_json(data)).located_in(Path.cwd())


def override(spec: ModelSpec, sections: Mapping[str, object]) -> ModelSpec:
    """Returns a spec with some keys merged over its own, mapping by mapping.

    Raises:
        SpecError: The result is wrong; the message lists every problem.
    """
    if not sections:
        return spec
    data = merge(spec.model_dump(mode="json", exclude_unset=True), as_json(sections))
    return _check(data).located_in(spec.folder)


def _check(data: Mapping[str, Any]) -> ModelSpec:
    return parse_spec(data, onnxruntime=installed_onnxruntime(), hint=_HINT)


def merge(beneath: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `own` over `beneath`, mapping by mapping; lists are not merged."""
    merged = {**beneath, **own}
    for key, value in own.items():
        under = beneath.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            merged[key] = merge(under, value)
    return merged


def _bundle_name(source: str) -> str:
    """Returns a name for a bundle; of a file on the Hub, where most are `model.onnx`, the repository's."""
    if "://" not in source:
        return make_name(PurePosixPath(source).stem)
    try:
        address = parse_hub_url(source)
    except ValueError:
        return make_name("")  # the check of the URL says what is wrong
    stem = PurePosixPath(address.path).stem
    repository = address.repository.rpartition("/")[2]
    return make_name(repository if stem == "model" else f"{repository}-{stem}")


def as_json(value: Any) -> Any:
    """Returns what Python code writes, paths and numbers of numpy included, as JSON types."""
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple | range):
        return [as_json(item) for item in value]
    # Numbers and arrays of numpy, which need not be imported for it.
    return value.tolist() if hasattr(value, "tolist") else value
