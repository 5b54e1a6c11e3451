"""Spec files: read, merged with `defaults.yaml`, validated; every problem of every file at once."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ortprep.bundle.file_memory import open_regular
from ortprep.errors import SpecError
from ortprep.quoting import quoted
from ortprep.spec.fleet import FLEET_FILE
from ortprep.spec.models import ModelSpec
from ortprep.spec.problems import UNREADABLE, Problem, build_error
from ortprep.spec.python_spec import merge
from ortprep.spec.session_options import warn_if_newer
from ortprep.spec.validation import locate, validate
from ortprep.spec.yaml_text import MAX_BYTES, YamlDocument, parse_yaml
from ortprep.versions import installed_onnxruntime

DEFAULTS_FILE = "defaults.yaml"
"""Values for whatever the specs of the same folder leave out."""

OPEN_QUESTION = "# OPEN QUESTION:"
"""What the line begins with that says what `init` could not find out; a spec with it is refused."""

_NO_SPECS = frozenset({DEFAULTS_FILE, FLEET_FILE})

_OWN_KEYS = ("name", "source")


def read_spec(path: Path, *, defaults: Mapping[str, Any] | None = None) -> ModelSpec:
    """Reads one spec; relative paths in it start from its folder.

    Args:
        path: The file.
        defaults: Values for what it leaves out; None for the `defaults.yaml` of its folder.

    Raises:
        SpecError: The file cannot be read or is wrong; the message lists every problem.
    """
    beneath = (
        _read_defaults(path.parent / DEFAULTS_FILE)
        if defaults is None
        else YamlDocument("defaults", defaults)
    )
    document, spec = _read(path, beneath)
    if spec is None or beneath.problems:
        raise build_error((*beneath.problems, *document.problems))
    return spec


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
    paths = _list_specs(folder)
    defaults = _read_defaults(folder / DEFAULTS_FILE)
    read = [_read(path, defaults) for path in paths]
    if names:
        _check_known(names, [_name_of(document) for document, _ in read], folder)
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
    paths = _spec_files(folder) if folder.is_dir() else []
    for document in map(_read_document, paths):
        own = {key: document.data.get(key) for key in _OWN_KEYS}
        if isinstance(own["name"], str):
            spec, _ = validate(own, onnxruntime=None)
            specs[own["name"]] = None if spec is None else spec.located_in(folder)
    return specs


def _list_specs(folder: Path) -> list[Path]:
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
        if path.suffix in (".yaml", ".yml") and path.name not in _NO_SPECS and not path.name.startswith(".")
    ]


def _read_document(path: Path) -> YamlDocument:
    """Reads a file into a document; if it cannot be read, the document's problems say why."""
    file = str(path)
    try:
        with open_regular(path) as stream:
            text = stream.read(MAX_BYTES + 1)
    except OSError as error:
        problem = Problem(file, None, (), f"{UNREADABLE}: {error.strerror}")
        return YamlDocument(file, problems=(problem,), readable=False)
    document = parse_yaml(text, file=file)
    if not document.readable:
        return document
    return replace(document, problems=(*document.problems, *_find_questions(text.decode("utf-8-sig"), file)))


def _find_questions(text: str, file: str) -> Iterator[Problem]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(OPEN_QUESTION):
            question = line.removeprefix(OPEN_QUESTION).strip()
            yield Problem(file, number, (), f"answer this question, then delete the line: {question}")


def _read(path: Path, defaults: YamlDocument) -> tuple[YamlDocument, ModelSpec | None]:
    """Reads a file over the defaults; the document has all problems, and there is a spec if it has none."""
    document = _read_document(path)
    if not document.readable:
        return document, None
    data, onnxruntime = merge(defaults.data, document.data), installed_onnxruntime()
    spec, faults = validate(data, onnxruntime=onnxruntime)
    document = replace(document, problems=_combine(document, locate(faults, document, defaults)))
    if spec is None or document.problems:
        return document, None
    warn_if_newer(data.get("runtime"), version=onnxruntime)
    return document, spec.located_in(path.parent, file=path.name)


def _name_of(document: YamlDocument) -> str:
    """Returns the model's name, or the file's if it has none."""
    name = document.data.get("name")
    return name if isinstance(name, str) else Path(document.file).stem


def _combine(document: YamlDocument, others: Iterable[Problem]) -> tuple[Problem, ...]:
    """Joins a document's own problems with those of its data that do not follow from them."""
    reported = {(problem.file, problem.line, problem.place) for problem in document.problems}
    return (*document.problems, *(p for p in others if (p.file, p.line, p.place) not in reported))


def _read_defaults(path: Path) -> YamlDocument:
    """Reads and validates the defaults alone, so that their problems name their own file."""
    if not path.exists():
        return YamlDocument(str(path))
    document = _read_document(path)
    if not document.readable:
        return document
    stray = [key for key in _OWN_KEYS if key in document.data]
    problems = [
        Problem(document.file, document.line_of((key,)), (key,), "belongs in each model's own file")
        for key in stray
    ]
    filled = {**document.data, "name": "defaults", "source": {"demo": "defaults"}}
    _, faults = validate(filled, onnxruntime=installed_onnxruntime())
    problems += _combine(document, locate(faults, document))
    data = {key: value for key, value in document.data.items() if key not in _OWN_KEYS}
    return replace(document, data=data, problems=tuple(problems))


def _check_known(names: Collection[str], known_names: Sequence[str], folder: Path) -> None:
    unknown = [name for name in names if name not in known_names]
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], known_names, n=1)
    raise SpecError(
        f"no such model: {', '.join(unknown)}\n"
        f"  expected the name of a spec in {folder}: {', '.join(known_names)}",
        hint=f"ortprep prepare {quoted(near[0] if near else known_names[0])}",
    )


def _find_namesakes(documents: Iterable[YamlDocument]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for document in documents:
        name = document.data.get("name")
        if isinstance(name, str) and name in first:
            text = f"{name!r} is already the name of {first[name]}; expected another"
            yield Problem(document.file, document.line_of(("name",)), ("name",), text)
        elif isinstance(name, str):
            first[name] = document.file
