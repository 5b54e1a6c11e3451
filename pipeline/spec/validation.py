"""From data to a `ModelSpec`, or to every problem in words a user can act on. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ortprep.spec.models import ModelSpec
from ortprep.spec.problems import MAX_TOLD, SHOWN_CHARACTERS, Place, Problem, build_error, dotted
from ortprep.spec.redaction import redact_url
from ortprep.spec.schema import describe, known_keys, schemas_at
from ortprep.spec.session_options import find_option_problems
from ortprep.spec.yaml_text import YamlDocument

_TELLING = ("value_error", "too_short", "too_long")
"""Kinds of error whose words say more than which type was expected."""

Fault = tuple[Place, str]
"""What is wrong at a place."""

Verdict = tuple[ModelSpec | None, tuple[Fault, ...]]
"""A spec, or None, and everything that is wrong."""


def parse_spec(data: Mapping[str, Any], *, onnxruntime: str | None = None) -> ModelSpec:
    """Builds a spec from JSON data; checks options against an ONNX Runtime version if given.

    Raises:
        SpecError: The data is no spec.
    """
    spec, faults = validate(data, onnxruntime=onnxruntime)
    if spec is None or faults:
        raise build_error(Problem("spec", None, place, text) for place, text in faults)
    return spec


def validate(data: Mapping[str, Any], *, onnxruntime: str | None) -> Verdict:
    """Returns the spec, or None, and every problem of `data`; arguments as in `parse_spec`.

    Types are strict, as in JSON: "5" is no number, 1 is not true.
    """
    try:
        text = json.dumps(data)
    except (TypeError, ValueError, RecursionError):
        return None, (((), "expected strings, numbers, lists and mappings only"),)
    options = tuple(find_option_problems(data.get("runtime"), version=onnxruntime)) if onnxruntime else ()
    try:
        return ModelSpec.model_validate_json(text, strict=True), options
    except ValidationError as error:
        details = error.errors(include_url=False)
    return None, (*_tell(details, data), *options)


def _tell(details: Sequence[Any], data: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Rewords pydantic's list: one fault per place, unions not alternative by alternative."""
    faults: dict[Fault, None] = {}
    doubtful: list[Fault] = []
    if len(details) >= MAX_TOLD:
        left_out = len(details) - MAX_TOLD + 1
        faults[(), f"{left_out} more problems than are told here"] = None
    for detail in details[: MAX_TOLD - 1]:
        place, exact = _place_in(data, detail)
        text = _word(detail, place)
        if text is None:
            continue
        faults[place, text] = None
        if not exact and detail["type"] not in _TELLING:
            doubtful.append((place, text))
    # That an alternative of a union failed says less than what failed inside another alternative.
    for fault in doubtful:
        if any(other != fault and other[0][: len(fault[0])] == fault[0] for other in faults):
            faults.pop(fault, None)
    return tuple(faults)


def _place_in(data: Any, detail: Any) -> tuple[Place, bool]:
    """Returns the error's place in the data, and whether it is exact: names no alternative of a union."""
    place: list[Any] = []
    for step in detail["loc"]:
        if _has(data, step):
            data = data[step]
        elif not (detail["type"] == "missing" and step == detail["loc"][-1]):
            continue
        place.append(step)
    return tuple(place), len(place) == len(detail["loc"])


def _word(detail: Any, place: Place) -> str | None:
    kind, got = detail["type"], detail["input"]
    if kind == "value_error":
        return f"{detail['ctx']['error']}{f', got {shown(got)}' if isinstance(got, str) else ''}"
    if kind == "missing":
        return f"missing; expected {describe(place)}"
    if kind == "extra_forbidden":
        return f"unknown key{_suggest(place)}"
    if kind == "json_invalid":
        return "expected text without lone surrogates, nested less than 200 levels deep"
    if kind == "string_pattern_mismatch":
        return f"expected letters, digits and '_' only, got {shown(got)}"
    if kind == "string_too_short":
        return "expected text that is not empty"
    if kind in ("too_short", "too_long"):
        return _word_length(detail, place, got)
    quote = "; write it in quotes" if _needs_quotes(place, got) else ""
    return f"expected {describe(place)}, got {shown(got)}{quote}"


def _word_length(detail: Any, place: Place, got: Any) -> str | None:
    least = detail["ctx"].get("min_length")
    if least is None:
        return f"expected {describe(place)}, at most {detail['ctx']['max_length']}; got {len(got)}"
    if len(got) >= least:
        return None  # Long enough as written: pydantic counts valid items only, and told of the others.
    return f"expected {describe(place)}, at least {least}; got {len(got)}"


def _needs_quotes(place: Place, got: Any) -> bool:
    kinds = {schema.get("type") for schema in schemas_at(place)}
    return kinds <= {"string", "null"} and isinstance(got, int | float)


def _suggest(place: Place) -> str:
    """Proposes the nearest key of the same mapping, or the section that has a key of that name."""
    *parents, key = place
    siblings = known_keys(tuple(parents))
    near = difflib.get_close_matches(str(key), siblings, n=1, cutoff=0.6)
    elsewhere = [dotted((s, str(key))) for s in known_keys(()) if key in known_keys((s,))]
    if near:
        return f"; did you mean {near[0]!r}?"
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return f"; expected one of {', '.join(siblings)}"


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
