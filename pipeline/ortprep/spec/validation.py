"""From data to a `ModelSpec`, or to every problem in words a user can act on. Pure."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ortprep.errors import propose
from ortprep.options import CUDA, Scalar, check_options
from ortprep.spec.models import ModelSpec
from ortprep.spec.urls import redact_url
from ortprep.spec.yaml_text import MAX_REPORTED, SHOWN_CHARACTERS, Place, Problem, YamlDocument, build_error

Fault = tuple[Place, str]
"""What is wrong at a place."""

M = TypeVar("M", bound=BaseModel)


def parse_spec(
    data: Mapping[str, Any], *, onnxruntime: str | None = None, hint: str | None = None
) -> ModelSpec:
    """Builds a spec from JSON data.

    Args:
        data: The spec, as JSON types.
        onnxruntime: Version to check options against; None not to check them.
        hint: Hint of the error; None for the one of a spec's file.

    Raises:
        SpecError: The data is no spec.
    """
    spec, faults = validate(data, onnxruntime=onnxruntime)
    if spec is None or faults:
        raise build_error((Problem("", None, place, text) for place, text in faults), hint=hint)
    return spec


def validate(
    data: Mapping[str, Any], *, onnxruntime: str | None
) -> tuple[ModelSpec | None, tuple[Fault, ...]]:
    """Returns the spec, or None, and every problem of `data`; arguments as in `parse_spec`."""
    spec, faults = check(ModelSpec, data)
    if onnxruntime:
        problems = find_option_problems(data.get("runtime"), version=onnxruntime)
        faults += tuple(islice(problems, MAX_REPORTED + 1))  # one more, so that the error says that there are
    return spec, faults


def check(kind: type[M], data: Mapping[str, Any]) -> tuple[M | None, tuple[Fault, ...]]:
    """Returns a `kind` of data, or None, and every problem of the data.

    Types are strict, as in JSON: "5" is no number, 1 is not true.
    """
    try:
        return kind.model_validate_json(json.dumps(data), strict=True), ()
    except ValidationError as error:
        details = error.errors(include_url=False)[:MAX_REPORTED]
    except (TypeError, ValueError, RecursionError):
        return None, (((), "expected strings, numbers, lists and mappings only"),)
    # One fault per place: the alternatives of a union are joined by "or".
    words: dict[Place, dict[str, str]] = {}
    for detail in details:
        place = _place_in(data, detail)
        words.setdefault(place, {})[_word(detail, place, kind)] = _got(detail)
    # What is wrong inside of a value says more than that the value as a whole fits no alternative.
    outer = {place[:depth] for place in words for depth in range(len(place))}
    return None, tuple(
        (place, " or ".join(alternatives).replace(" or expected", " or") + next(iter(alternatives.values())))
        for place, alternatives in words.items()
        if place not in outer
    )


def _place_in(data: Any, detail: Any) -> Place:
    """Returns the error's place in the data: pydantic's, without the names of a union's alternatives."""
    place: list[str | int] = []
    for step in detail["loc"]:
        if _has(data, step):
            data = data[step]
        elif not (detail["type"] == "missing" and step == detail["loc"][-1]):
            continue
        place.append(step)
    return tuple(place)


def _word(detail: Any, place: Place, kind: type[BaseModel]) -> str:
    """Returns a problem that pydantic found, as the writer of a spec understands it."""
    match detail["type"]:
        case "value_error":
            return str(detail["ctx"]["error"])
        case "missing":
            return "missing"
        case "extra_forbidden":
            return f"unknown key; {propose(str(place[-1]), known_keys(place[:-1], kind))}"
        case "json_invalid":
            return "expected text without lone surrogates, nested less than 200 levels deep"
    text = re.sub(r"^\w+ should (be |have |)", "expected ", detail["msg"])
    return text.replace("a valid array", "a list").replace("an object", "a mapping")


def _got(detail: Any) -> str:
    kind, got = detail["type"], detail["input"]
    if kind in ("missing", "extra_forbidden", "json_invalid", "too_short", "too_long"):
        return ""
    return "" if kind == "value_error" and not isinstance(got, str) else f", got {shown(got)}"


@functools.cache
def known_keys(place: Place, kind: type[BaseModel] = ModelSpec) -> tuple[str, ...]:
    """Returns the keys that a mapping at `place` of a `kind`'s data may have; none where it takes any."""
    models = [kind]
    for step in place:  # keys of mappings and indices of lists lead to nothing else
        fields = [model.model_fields[step] for model in models if step in model.model_fields]
        models = [one for field in fields for one in _find_models(field.annotation)] if fields else models
    return tuple(key for model in models for key in model.model_fields)


def _find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields the sections that a type has in it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _find_models(inner)


def shown(value: Any) -> str:
    """Returns a value for an error message: short, and without the secrets of a URL."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        text = redact_url(value) if "://" in value else value
        return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…")
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return json.dumps(value)


def locate(faults: Sequence[Fault], *documents: YamlDocument) -> Iterator[Problem]:
    """Yields every fault with its file and line.

    Args:
        faults: Faults of the documents' merged data.
        documents: The model's own file first, then its defaults. A missing place belongs to the first
            document that has its surroundings.
    """
    for place, text in faults:
        home = max(documents, key=lambda document: _depth_reached(document.data, place))
        yield Problem(home.file, home.line_of(place), place, text)


def _depth_reached(data: Any, place: Place) -> int:
    for depth, step in enumerate(place):
        if not _has(data, step):
            return depth
        data = data[step]
    return len(place)


def _has(data: Any, step: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(step, int) and step < len(data)
    return isinstance(data, Mapping) and step in data


def find_option_problems(runtime: object, *, version: str) -> Iterator[Fault]:
    """Yields the option problems in a spec's `runtime` data, invalid or not, with their places.

    ONNX Runtime itself accepts unknown session config keys and invalid values silently.
    """
    for section, table in (("session_config", "session"), ("cuda", CUDA)):
        for key, value in _scalars(runtime, section):
            for problem in check_options(table, {key: value}, version=version):
                yield ("runtime", section, key), problem


def _scalars(runtime: object, section: str) -> Iterator[tuple[str, Scalar]]:
    entries: Any = runtime.get(section) if isinstance(runtime, Mapping) else None
    if isinstance(entries, Mapping):
        yield from ((key, value) for key, value in entries.items() if isinstance(value, Scalar))
