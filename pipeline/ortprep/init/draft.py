"""`init`: from a model file to a spec that it runs with, as YAML with the reason of every value."""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.atomic import write_bytes_atomic
from ortprep.bundle.file_links import refuse_links
from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.paths import make_name
from ortprep.errors import DISK_ERRORS, SourceError, SpecError
from ortprep.init.input_search import Feed, ObservedInput
from ortprep.init.trial_run import InitTrial, try_inputs
from ortprep.quoting import quoted
from ortprep.spec.models import ModelSpec
from ortprep.spec.reading import DEFAULTS_FILE, OPEN_QUESTION, list_sources
from ortprep.spec.urls import redact_url
from ortprep.spec.validation import parse_spec
from ortprep.spec.yaml_text import parse_yaml, read_yaml
from ortprep.stages.fetch.stage import local_source

SPECS_FOLDER = Path("configs")
_MAX_SHOWN = 6


def refuse_specs_link(folder: Path) -> None:
    """Raises SpecError if the default folder of specs is a link, which a clone can bring.

    A folder that the user names may be one.
    """
    if folder == SPECS_FOLDER:
        refuse_links([folder])


Say = Callable[[str], None]
"""Takes a line about what is going on."""


@dataclass(frozen=True)
class InitResult:
    """A spec that was drafted for a model, not yet written.

    Attributes:
        spec: The spec, located where its file belongs.
        path: Path of its file.
        text: Content of its file.
        question: The question that is left, about the shape of an input, in one line; "" if the model ran.
        trial: Result of running the model.
    """

    spec: ModelSpec
    path: Path
    text: str
    question: str
    trial: InitTrial

    def write(self, *, force: bool = False) -> Path:
        """Writes the spec's file and returns its path.

        Args:
            force: Whether to replace a file that is there.

        Raises:
            SpecError: There is such a file, its folder cannot be made, or `configs` is a link.
            OSError: The disk is full or read-only.
        """
        refuse_specs_link(self.path.parent)
        if self.path.exists() and not force:
            raise SpecError(
                f"spec exists: {self.path}\n  expected no such file, since its content would be lost",
                hint=f"ortprep init MODEL --out {quoted(self.path.parent)} --force   # replaces it",
            )
        try:
            write_bytes_atomic(self.path, self.text.encode("utf-8"))
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise
            raise SpecError(
                f"cannot write specs to {self.path.parent}\n  expected a folder, got: {error.strerror}",
                hint="ortprep init MODEL --out DIR",
            ) from error
        return self.path


def init_spec(
    model: Path | str,
    *,
    folder: Path = SPECS_FOLDER,
    name: str | None = None,
    observed: Mapping[str, ObservedInput] | None = None,
    sections: Mapping[str, Any] | None = None,
    say: Say = lambda _line: None,
    may_drop_zip_map: bool = False,
) -> InitResult:
    """Drafts a spec: reads a model's graph, proposes inputs, runs the model and tries what failures suggest.

    Args:
        model: The ONNX file; its external data beside it.
        folder: Folder of the spec and its `defaults.yaml`; it need not exist.
        name: Name of the spec; else that of this model's spec in the folder, else the file's.
        observed: Known inputs, by name; they replace the proposed ones.
        sections: Further sections of the spec, as JSON types; they replace the proposed ones.
        say: Takes what is going on.
        may_drop_zip_map: Whether the bundle may return a matrix where the model's last node is a `ZipMap`.

    Returns:
        The draft, with a `question` if the model did not run.

    Raises:
        SourceError: It is not a model, ONNX Runtime does not accept it, it takes what is no tensor, an
            axis of an input is too long, it has no outputs, or it has no inputs and does not run.
        SpecError: An observed input or a section does not fit.
        ChildError: Running it crashed or took too long.
        OSError: There is no room for temporary files.
    """
    path, known = _local_path(model), dict(observed or {})
    spec_name = name or find_spec_name(path, folder) or choose_name(path, folder)
    say(f"running {path.name} on proposed inputs")
    trial = try_inputs(path, known, may_drop_zip_map=may_drop_zip_map)
    question = _find_question(trial, path)
    if trial.changes:
        say(f"without its ZipMap: {'; '.join(trial.changes)}")
    text = write_spec_text(
        trial,
        name=spec_name,
        path=_relative(path, folder),
        size_bytes=path.stat().st_size + sum(trial.facts.external.values()),
        defaults=read_yaml(folder / DEFAULTS_FILE).data.keys(),
        sections=sections or {},
        question=question,
    )
    file = f"{spec_name}.yaml"
    document = parse_yaml(text.encode("utf-8"), file=spec_name)
    spec = parse_spec(document.data).located_in(folder, file=file)
    return InitResult(spec, folder / file, text, question, trial)


def _local_path(model: Path | str) -> Path:
    """Returns the path of a model's file.

    Raises:
        SourceError: It is a URL, or there is no such file.
    """
    text = os.fspath(model)
    if "://" in text:
        url = redact_url(text)
        raise SourceError(
            f"not a file on this machine: {url}\n  expected the path of an ONNX file, got a URL",
            hint="download it, and run ortprep init FILE.onnx",
        )
    path = Path(text)
    if not path.is_file():
        nearest = next(one for one in (path, *path.parents) if one.is_dir())
        raise SourceError(
            f"no such model: {path}\n  expected an ONNX file, got {'a folder' if path.is_dir() else 'none'}",
            hint=f"find {quoted(path)} -name '*.onnx'" if path.is_dir() else quoted("ls", nearest),
        )
    return path


def _find_question(trial: InitTrial, model: Path) -> str:
    """Returns what to ask of a model that did not run, with what was tried; "" of one that did.

    Raises:
        SourceError: It did not run, and has no input to ask about.
    """
    inputs = trial.facts.interface.inputs
    if not trial.error:
        return ""
    if not inputs:
        raise SourceError(
            f"model that does not run, and has no inputs: {model}\n"
            f"  expected ONNX Runtime to run it, got: {trial.error}",
            hint="export the model again; no input can change this",
        )
    # That with the most open sizes, since a batch is seldom the cause.
    asked = max(inputs, key=lambda item: sum(not isinstance(axis, int) for axis in item.shape or (None,) * 9))
    tried = list(dict.fromkeys(str(list(shapes[asked.name])) for shapes in trial.tried))
    more = f" and {len(tried) - _MAX_SHOWN} more" if len(tried) > _MAX_SHOWN else ""
    return (
        f"which shape does input {show(asked.name)} {show_shape(asked)} take? "
        f"Tried {', '.join(tried[:_MAX_SHOWN])}{more}; ONNX Runtime said: {show(trial.error)}"
    )


def _relative(model: Path, folder: Path) -> str:
    """Returns a model's path relative to the spec's folder; absolute if they share no folder but the root."""
    target, start = model.absolute(), folder.absolute()
    if target.parts[:2] != start.parts[:2]:
        return str(target)
    return os.path.relpath(target, start)


def find_spec_name(model: Path, configs: Path) -> str | None:
    """Returns the name of the spec in a folder whose source is that file, None if there is none."""
    for name, spec in list_sources(configs).items():
        with suppress(SourceError):
            source = None if spec is None else local_source(spec)
            if source is not None and os.path.realpath(source) == os.path.realpath(model):
                return name
    return None


def choose_name(model: Path, configs: Path) -> str:
    """Returns a name that no spec has: that of a model's file, or of its folder and its file.

    Raises:
        SpecError: Other models have both.
    """
    taken, absolute = list_sources(configs), model.absolute()
    candidates = [make_name(model.stem), make_name(f"{absolute.parent.name}-{model.stem}")]
    for name in candidates:
        if name not in taken and not (configs / f"{name}.yaml").exists():
            return name
    raise SpecError(
        f"no name left for the spec of {model}\n  expected a free name, got other models called "
        f"{' and '.join(dict.fromkeys(candidates))} in {configs}",
        hint=f"ortprep init {quoted(model)} --name NAME",
    )


_WIDTH = 110
_PLAIN = re.compile(r"(\.\./)*[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = frozenset(("null", "true", "false"))
_TRIALS = 40
_MIN_BUDGET_S, _MAX_BUDGET_S = 60, 900
_PROCESS_S = 1.0
_PRECISION = (
    "Precision: that of the model. Lower precision changes answers, so you must ask for it: "
    "`convert: {precision: int8, ladder: [int8, fp32]}` tries int8 behind an accuracy gate."
)


def write_spec_text(
    trial: InitTrial,
    *,
    name: str,
    path: str,
    size_bytes: int,
    defaults: Set[str],
    sections: Mapping[str, Any],
    question: str,
) -> str:
    """Returns a spec as YAML.

    Args:
        trial: Result of running the model.
        name: Name of the spec.
        path: The model, relative to the spec's folder.
        size_bytes: Size of the model, weights included.
        defaults: Keys that the folder's `defaults.yaml` already gives.
        sections: Further sections of the spec, which replace the proposed ones.
        question: The question that is left; "" for none.
    """
    ran = "did not run" if trial.error else "ran"
    how = f"The model {ran} on these inputs with ONNX Runtime {trial.onnxruntime}."
    lines = comment(
        f"Written by `ortprep init`. {how} Every value is a proposal: replace it with what production sends."
    )
    if question:
        lines.append(f"{OPEN_QUESTION} {question}")
    if trial.changes:
        lines += comment(f"The bundle has no ZipMap: {'; '.join(trial.changes)}.")
    option = ", drop_zip_map: true" if trial.changes else ""
    opset = trial.facts.opsets.get("", 0)
    lines += [
        f"name: {_scalar(name)}",
        f"source: {{path: {_scalar(path)}{option}}}  # {size_bytes / 1e6:.1f} MB, opset {opset}",
    ]
    if trial.feeds:
        lines += ["", "inputs:"]
    for item in trial.facts.interface.inputs:
        lines += _describe_input(item, trial.feeds[item.name])
    proposed = {
        "targets": ["", "targets: auto  # cpu, and cuda on machines where it works"],
        "convert": comment(_PRECISION),
        "tune": [_budget(trial)],
    }
    for key, section in proposed.items():
        if key not in sections and key not in defaults:
            lines += section
    lines += [f"{_scalar(key)}: {_flow(value)}" for key, value in sections.items()]
    return "\n".join([*lines, ""])


def show_shape(item: TensorSpec) -> str:
    """Returns a declared shape as people write it: `[batch, 3, ?, ?]`, `of any rank` for none."""
    if item.shape is None:
        return "of any rank"
    return f"[{', '.join('?' if axis is None else show(str(axis)) for axis in item.shape)}]"


def show(text: str) -> str:
    """Returns text for a comment: on one line, without what an editor or a terminal takes for orders."""
    return "".join(one if one.isprintable() else " " for one in text)


def comment(text: str, *, indent: int = 0) -> list[str]:
    """Returns text as lines of a YAML comment."""
    wrapped = textwrap.wrap(show(text), _WIDTH - indent - 2)
    return [f"{' ' * indent}# {line}" for line in wrapped]


def _describe_input(item: TensorSpec, feed: Feed) -> Iterator[str]:
    """Yields the lines of one input: its type, shapes and values, with the reasons."""
    yield f"  {_scalar(item.name)}:  # {show(item.dtype)} {show_shape(item)}"
    yield from comment(feed.reason, indent=4)
    yield f"    shapes: [{', '.join(str(list(shape)) for shape in feed.shapes)}]"
    values = feed.values
    if values.range is not None:
        low, high = (_number(one) for one in values.range)
        yield f"    range: [{low}, {high}]  # {show(values.reason)}"
    elif values.values is not None:
        yield f"    values: {_flow(list(values.values))}  # {show(values.reason)}"


def _budget(trial: InitTrial) -> str:
    """Returns the budget of a search that is worth it: time for 40 plans, at most 15 minutes."""
    trial_s = _PROCESS_S + trial.load_s + 10 * trial.run_s
    budget = min(max(math.ceil(_TRIALS * trial_s / 30) * 30, _MIN_BUDGET_S), _MAX_BUDGET_S)
    count = max(1, int(budget / trial_s))
    tune = f"tune: {{runs_per_load: 10000, budget_s: {budget}}}"
    return f"{tune}  # about {count} plans at {trial_s:.1f} s each"


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else _flow(text)


def _flow(value: object) -> str:
    """Returns a value as JSON, which is YAML too, up to characters that YAML wants escaped another way."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(value)
