"""Strict YAML: text to plain JSON data, with the line of every value.

Scalars follow YAML 1.2's core schema, as in editors with a schema: `on`, `no`, `1:30` and `2026-01-01` are
strings and `1e-3` is a number. Refused are duplicate keys, keys that are not strings, tags, directives,
aliases (and so merge keys) and numbers that are not finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ortprep.bundle.file_memory import open_regular
from ortprep.errors import SpecError

MAX_BYTES = 1024 * 1024
"""Maximum size of a spec, in bytes."""

MAX_DEPTH = 40
"""Maximum nesting; a spec needs 6."""

MAX_VALUES = 20_000
"""Most values of a file: each takes kilobytes of memory once it is checked."""

_DIRECTIVE = re.compile(r"(?:^|[\n\r\x85\u2028\u2029])\ufeff*%")
_SCALARS = (
    (re.compile(r"~|null|Null|NULL|"), lambda _: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]{1,100}"), int),
    (re.compile(r"0o[0-7]{1,100}|0x[0-9a-fA-F]{1,100}"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda _: math.inf),
)
"""How scalars without quotes look, and what they mean; all others are text."""


@dataclass(frozen=True)
class YamlDocument:
    """One YAML file as data.

    Attributes:
        data: Its top-level mapping: dicts, lists, str, int, float, bool and None only.
        lines: Line of every key and every list item, from 1, by place.
        problems: Reasons why it is not usable; `data` is empty then.
        text: Text of the file, comments included.
    """

    file: str
    data: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[Place, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    text: str = ""

    def line_of(self, place: Place) -> int | None:
        """Returns the line of `place`, or of the nearest place around it."""
        around = (place[:length] for length in range(len(place), -1, -1))
        return next((self.lines[outer] for outer in around if outer in self.lines), None)


class _RefusedError(Exception):
    """The text is refused; its arguments are the line, or None, and why."""


def read_yaml(path: Path) -> YamlDocument:
    """Reads a file as `parse_yaml` does; that it cannot be read is a problem of the document too."""
    try:
        with open_regular(path) as stream:
            return parse_yaml(stream.read(MAX_BYTES + 1), file=str(path))
    except OSError as error:
        problem = Problem(str(path), None, (), f"cannot be read: {error.strerror}")
        return YamlDocument(str(path), problems=(problem,))


def parse_yaml(text: bytes, *, file: str) -> YamlDocument:
    """Reads one YAML document whose top level is a mapping.

    Total: the first problem of the text (too large, not UTF-8, not YAML, several documents, no mapping, a
    duplicate key, …) is in the document's `problems`. `file` is the name for messages.
    """
    lines: dict[Place, int] = {(): 1}
    try:
        decoded = _decode(text)
        return YamlDocument(file, _parse(decoded, lines), lines, text=decoded)
    except _RefusedError as error:
        line, reason = error.args
    except yaml.YAMLError as error:  # of a control character there is no mark
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = None if mark is None else int(mark.line) + 1
        reason = f"not readable as YAML: {getattr(error, 'problem', None) or ' '.join(str(error).split())}"
    return YamlDocument(file, problems=(Problem(file, line, (), reason),))


def _decode(text: bytes) -> str:
    """Returns the text of a file that is not too large and has no directives."""
    if len(text) > MAX_BYTES:
        raise _RefusedError(None, f"file too large; expected at most {MAX_BYTES} bytes")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise _RefusedError(line, f"expected UTF-8 text, got byte 0x{text[error.start]:02x}") from None
    if found := _DIRECTIVE.search(decoded):  # libyaml compares each `%TAG` with all earlier ones
        line = len(decoded[: found.end()].splitlines())
        raise _RefusedError(line, "directives are not supported, got a line that begins with %; remove it")
    return decoded


def _parse(text: str, lines: dict[Place, int]) -> dict[str, Any]:
    """Returns the data of the only document of a text, and notes the line of every place."""
    skipped = (yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent)
    events = (event for event in yaml.parse(text, yaml.CSafeLoader) if not isinstance(event, skipped))
    first = next(events)
    if isinstance(first, yaml.StreamEndEvent):
        return {}
    if not isinstance(first, yaml.MappingStartEvent):
        raise _RefusedError(_line(first), "expected a mapping (key: value) at the top level")
    data: dict[str, Any] = _read(first, events, (), lines)
    if not isinstance(second := next(events), yaml.StreamEndEvent):
        raise _RefusedError(_line(second), "expected one document, got another")
    return data


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _read(event: Any, events: Iterator[Any], place: Place, lines: dict[Place, int]) -> Any:
    """Returns the data of the value that begins with an event; takes the rest of it from `events`."""
    if isinstance(event, yaml.AliasEvent):
        raise _RefusedError(_line(event), "aliases are not supported; write the value again")
    if event.tag is not None:
        tag = event.tag.replace("tag:yaml.org,2002:", "!!")[:SHOWN_CHARACTERS]
        raise _RefusedError(_line(event), f"tags are not supported, got {tag}; remove it")
    if isinstance(event, yaml.ScalarEvent):
        return _read_scalar(event)
    if len(place) >= MAX_DEPTH:
        raise _RefusedError(_line(event), f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Any] = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            inner = (*place, len(items))
            _note(inner, item, lines)
            items.append(_read(item, events, inner, lines))
        return items
    result: dict[str, Any] = {}
    while not isinstance(key_event := next(events), yaml.MappingEndEvent):
        key = _read_key(key_event)
        inner = (*place, key)
        if key in result:
            reason = f"duplicate key {key!r}; it is already in line {lines[inner]}"
            raise _RefusedError(_line(key_event), reason)
        _note(inner, key_event, lines)
        result[key] = _read(next(events), events, inner, lines)
    return result


def _note(place: Place, event: Any, lines: dict[Place, int]) -> None:
    """Notes the line of a place; refuses more than `MAX_VALUES`."""
    if len(lines) > MAX_VALUES:
        raise _RefusedError(_line(event), f"more than {MAX_VALUES} values; large inputs belong into samples")
    lines[place] = _line(event)


def _read_key(event: Any) -> str:
    """Returns the key of a mapping, which must be text."""
    is_scalar = isinstance(event, yaml.ScalarEvent)
    text = event.value if is_scalar else "a list or mapping"
    key = _read(event, iter(()), (), {}) if is_scalar else None
    if not isinstance(key, str):
        raise _RefusedError(
            _line(event), f'expected a string as key, got {text}; write it in quotes: "{text}"'
        )
    return key


def _read_scalar(event: Any) -> Any:
    """Returns the value of a scalar; what is in quotes is text."""
    text = event.value
    meanings = (meaning for look, meaning in _SCALARS if event.implicit[0] and look.fullmatch(text))
    value = next(meanings, str)(text)
    if isinstance(value, float) and not math.isfinite(value):
        raise _RefusedError(_line(event), f"expected a finite number, got {text[:SHOWN_CHARACTERS]}")
    return value


Place = tuple[str | int, ...]
"""Position of a value in a file: keys and list indices from the top."""

MAX_REPORTED = 200
"""Maximum number of problems in one error."""

SHOWN_CHARACTERS = 60
"""Maximum length of a user's text in a message."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, order=True)
class Problem:
    """One problem.

    Attributes:
        file: Path of the file; empty for a spec written in Python.
        line: Line, from 1; None where no line can be named.
        place: Position in the file's data; empty for the file as a whole.
    """

    file: str
    line: int | None
    place: Place
    text: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (where, dotted(self.place), self.text) if part)


def dotted(place: Place) -> str:
    """Returns a place as people write it: `inputs.data_0.shapes[0][2]`, odd keys in quotes."""
    text = ""
    for step in place:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            key = step if len(step) <= SHOWN_CHARACTERS else step[:SHOWN_CHARACTERS] + "…"
            text += ("." if text else "") + (key if _PLAIN_KEY.fullmatch(key) else repr(key))
    return text


def build_error(problems: Iterable[Problem], *, hint: str | None = None) -> SpecError:
    """Returns the error that lists `problems`, each once, in the order of files and lines."""
    unique = sorted(set(problems), key=lambda p: (p.file, p.line or 0, dotted(p.place), p.text))
    files = list(dict.fromkeys(problem.file for problem in unique))
    count = "1 problem" if len(unique) == 1 else f"{len(unique)} problems"
    one = f"bad spec: {files[0]}" if files[0] else "bad spec"
    what = one if len(files) == 1 else f"bad specs: {len(files)} files"
    lines = "".join(f"\n  {problem}" for problem in unique[:MAX_REPORTED])
    if len(unique) > MAX_REPORTED:
        lines += f"\n  … and {len(unique) - MAX_REPORTED} more"
    return SpecError(
        f"{what} ({count}){lines}", hint=hint or "ortprep schema   # every key and what it takes"
    )
