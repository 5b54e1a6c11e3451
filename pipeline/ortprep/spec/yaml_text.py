"""Strict YAML: text to plain JSON data, with the line of every value.

Scalars follow YAML 1.2's core schema, as in editors with a schema: `on`, `no`, `1:30` and `2026-01-01` are
strings and `1e-3` is a number. Refused are duplicate keys, keys that are not strings, tags, directives, merge
keys, numbers that are not finite, and aliases that expand to much more than was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ortprep.spec.problems import Place, Problem

MAX_BYTES = 1024 * 1024
"""Maximum size of a spec, in bytes."""

MAX_EXPANDED_BYTES = 4 * 1024 * 1024
"""Maximum size of a document with its aliases expanded, `_NODE_BYTES` for every value."""

MAX_DEPTH = 40
"""Maximum nesting; a spec needs 6."""

_NODE_BYTES = 32
_MAX_DIGITS = 100
_NULL = frozenset(["", "~", "null", "Null", "NULL"])
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_DIRECTIVE = re.compile(r"(?:^|[\n\r\x85\u2028\u2029])\ufeff*%")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

_PLAIN, _QUOTED, _COLLECTION = "plain", "quoted", "collection"


@dataclass(frozen=True)
class YamlDocument:
    """One YAML file as data.

    Attributes:
        data: Its top-level mapping: dicts, lists, str, int, float, bool and None only.
        lines: Line of every key and every list item, from 1, by place.
        problems: Its problems; `data` lacks the parts concerned, or has None there.
        readable: Whether the file is YAML; if not, `data` is empty and `problems` say why.
    """

    file: str
    data: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[Place, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    readable: bool = True

    def line_of(self, place: Place) -> int | None:
        """Returns the line of `place`, or of the nearest place around it."""
        for length in range(len(place), -1, -1):
            if place[:length] in self.lines:
                return self.lines[place[:length]]
        return None


_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"
_PARSER_TOO_DEEP = "exceeded maximum nesting depth"
"""How PyYAML 6.0.4 and later refuse a much deeper text, while they parse it."""


class _TooDeepError(yaml.error.MarkedYAMLError):
    pass


class _UnreadableError(Exception):
    """The text is not readable."""

    def __init__(self, line: int | None, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


class _Loader(yaml.CSafeLoader):
    """Marks written tags, and limits the depth while composing."""

    _depth = 0

    def resolve(self, kind: type[yaml.Node], _value: object, implicit: Any) -> str:
        if kind is not yaml.ScalarNode:
            return _COLLECTION
        return _PLAIN if implicit[0] else _QUOTED

    def descend_resolver(self, parent: yaml.Node | None, _index: object) -> None:
        self._depth += 1
        if parent is not None and self._depth > MAX_DEPTH:
            raise _TooDeepError(problem=_TOO_DEEP, problem_mark=parent.start_mark)

    def ascend_resolver(self) -> None:
        self._depth -= 1


def parse_yaml(text: bytes, *, file: str) -> YamlDocument:
    """Reads one YAML document whose top level is a mapping.

    Total: every problem of the text (too large, not UTF-8, not YAML, several documents, an alias bomb, no
    mapping, …) is in the document's `problems`. `file` is the name for messages.
    """
    reading = _Reading(file)
    try:
        data = _read_top(text, reading)
    except _UnreadableError as error:
        return YamlDocument(file, problems=(Problem(file, error.line, (), error.text),), readable=False)
    return YamlDocument(file, data, {**reading.lines, (): 1}, tuple(reading.problems))


def _read_top(text: bytes, reading: _Reading) -> dict[str, Any]:
    decoded = _decode(text)
    _check_directives(decoded)
    root = _compose(decoded)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise _UnreadableError(_line(root), "expected a mapping (key: value) at the top level")
    return reading.read(root, ()) or {}


def _decode(text: bytes) -> str:
    if len(text) > MAX_BYTES:
        raise _UnreadableError(None, f"file too large; expected at most {MAX_BYTES} bytes")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise _UnreadableError(line, f"expected UTF-8 text, got byte 0x{text[error.start]:02x}") from None


def _check_directives(text: str) -> None:
    """Refuses a line that begins with `%`: libyaml compares each `%TAG` with all earlier ones."""
    if found := _DIRECTIVE.search(text):
        line = len(text[: found.end()].splitlines())
        raise _UnreadableError(line, "directives are not supported, got a line that begins with %; remove it")


def _compose(text: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, _Loader)
    except yaml.reader.ReaderError as error:
        line = text.encode()[: error.position].count(b"\n") + 1
        raise _UnreadableError(line, f"control character U+{error.character:04X} is not allowed") from None
    except yaml.error.MarkedYAMLError as error:
        raise _syntax_error(error, text) from None
    return node


def _syntax_error(error: yaml.error.MarkedYAMLError, text: str) -> _UnreadableError:
    mark = error.problem_mark or error.context_mark
    if error.problem == _PARSER_TOO_DEEP:
        return _UnreadableError(mark.line + 1 if mark else None, f"not readable as YAML: {_TOO_DEEP}")
    if mark is None:
        return _UnreadableError(None, f"not readable as YAML: {error.problem or error.context}")
    line, lines = mark.line + 1, text.splitlines()
    if line <= len(lines) and lines[mark.line][: mark.column + 1].strip(" -") == "\t":
        return _UnreadableError(line, "expected spaces for indentation, got a tab")
    if error.problem == "but found another document":
        return _UnreadableError(line, "expected one document, got another after ---")
    return _UnreadableError(line, f"not readable as YAML: {error.problem or error.context}")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _Reading:
    """The state of turning one node graph into data."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[Place, int] = {}
        self.problems: list[Problem] = []
        self._expanded_bytes = 0

    def read(self, node: yaml.Node, place: Place) -> Any:
        self._bound(node, place)
        if node.tag not in (_PLAIN, _QUOTED, _COLLECTION):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")[:60]
            self._complain(node, place, f"tags are not supported, got {tag}; remove it")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self._read_item(item, (*place, i)) for i, item in enumerate(node.value)]
        return self._read_scalar(node, place)

    def _bound(self, node: yaml.Node, place: Place) -> None:
        self._expanded_bytes += _NODE_BYTES + (len(node.value) if isinstance(node.value, str) else 0)
        if self._expanded_bytes > MAX_EXPANDED_BYTES or len(place) > MAX_DEPTH:
            limit = f"{MAX_EXPANDED_BYTES} bytes and {MAX_DEPTH} levels"
            raise _UnreadableError(
                _line(node), f"too large; expected at most {limit} with all aliases expanded"
            )

    def _read_item(self, node: yaml.Node, place: Place) -> Any:
        self.lines[place] = _line(node)
        return self.read(node, place)

    def _read_mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._read_key(key_node, place)
            if key is None:
                continue
            inner = (*place, key)
            if key in result:
                first = self.lines[inner]
                self._complain(key_node, inner, f"duplicate key; it is already in line {first}")
                continue
            self.lines[inner] = _line(key_node)
            result[key] = self.read(value_node, inner)
        return result

    def _read_key(self, node: yaml.Node, place: Place) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == _PLAIN and node.value == "<<":
            self._complain(node, place, "merge keys (<<) are not supported; use defaults.yaml")
            return None
        key = self.read(node, place) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(key, str):
            return key
        text = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        self._complain(node, place, f'expected a string as key, got {text}; write it in quotes: "{text}"')
        return None

    def _read_scalar(self, node: yaml.Node, place: Place) -> str | int | float | bool | None:
        text: str = node.value
        if node.tag == _QUOTED:
            return self._read_text(node, place)
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _INT.fullmatch(text) or _FLOAT.fullmatch(text) or _NOT_FINITE.fullmatch(text):
            return self._read_number(node, place)
        return self._read_text(node, place)

    def _read_text(self, node: yaml.Node, place: Place) -> str:
        if "\0" in node.value:
            self._complain(node, place, "expected text, got a NUL")
            return ""
        return str(node.value)

    def _read_number(self, node: yaml.Node, place: Place) -> int | float:
        text: str = node.value
        if len(text) > _MAX_DIGITS:
            self._complain(node, place, "number with too many digits; write it in quotes if it is a string")
            return 0
        if _INT.fullmatch(text):
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        value = math.inf if _NOT_FINITE.fullmatch(text) else float(text)
        if not math.isfinite(value):
            self._complain(node, place, f"expected a finite number, got {text}")
            return 0.0
        return value

    def _complain(self, node: yaml.Node, place: Place, text: str) -> None:
        self.problems.append(Problem(self.file, _line(node), place, text))
