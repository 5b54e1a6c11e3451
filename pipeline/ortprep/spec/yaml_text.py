"""Strict YAML: text to plain JSON data, with the line of every value.

Scalars follow YAML 1.2's core schema, as in editors with a schema: `on`, `no`, `1:30` and `2026-01-01` are
strings and `1e-3` is a number. Refused are duplicate keys, keys that are not strings, tags, directives,
aliases, merge keys and numbers that are not finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ortprep.spec.problems import SHOWN_CHARACTERS, Place, Problem

MAX_BYTES = 1024 * 1024
"""Maximum size of a spec, in bytes."""

MAX_DEPTH = 40
"""Maximum nesting; a spec needs 6."""

_DIRECTIVE = re.compile(r"(?:^|[\n\r\x85\u2028\u2029])\ufeff*%")
_COLLECTION, _TEXT, _MERGE = "collection", "text", "merge"
_PLAIN = (
    (_MERGE, re.compile("<<"), str),
    ("null", re.compile(r"~|null|Null|NULL|"), lambda _: None),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    ("decimal", re.compile(r"[-+]?[0-9]{1,100}"), int),
    ("integer", re.compile(r"0o[0-7]{1,100}|0x[0-9a-fA-F]{1,100}"), lambda text: int(text, 0)),
    ("float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    ("infinite", re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda _: math.inf),
)
"""Kinds of scalars without quotes: the name, how they look, and what they mean; all others are text."""

_CONVERTERS = {_TEXT: str, **{kind: convert for kind, _, convert in _PLAIN}}
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"


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
        around = (place[:length] for length in range(len(place), -1, -1))
        return next((self.lines[outer] for outer in around if outer in self.lines), None)


class _UnreadableError(Exception):
    """The text is not readable; its arguments are the line, or None, and why."""


class _Loader(yaml.CSafeLoader):
    """Tags nodes by the kinds above, so that a tag that was written differs, and limits the depth."""

    _depth = 0

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is not yaml.ScalarNode:
            return _COLLECTION
        kinds = (name for name, pattern, _ in _PLAIN if implicit[0] and pattern.fullmatch(value))
        return next(kinds, _TEXT)

    def descend_resolver(self, parent: yaml.Node | None, _index: object) -> None:
        self._depth += 1
        if parent is not None and self._depth > MAX_DEPTH:
            raise _UnreadableError(_line(parent), _TOO_DEEP)

    def ascend_resolver(self) -> None:
        self._depth -= 1


def parse_yaml(text: bytes, *, file: str) -> YamlDocument:
    """Reads one YAML document whose top level is a mapping.

    Total: every problem of the text (too large, not UTF-8, not YAML, several documents, no mapping, …) is in
    the document's `problems`. `file` is the name for messages.
    """
    reading = _Reading(file)
    try:
        root = _compose(text)
        data = {} if root is None else reading.read(root, ())
    except _UnreadableError as error:
        line, reason = error.args
        return YamlDocument(file, problems=(Problem(file, line, (), reason),), readable=False)
    return YamlDocument(file, data or {}, {**reading.lines, (): 1}, tuple(reading.problems))


def _compose(text: bytes) -> yaml.Node | None:
    """Returns the root of a document, a mapping; None of an empty one."""
    if len(text) > MAX_BYTES:
        raise _UnreadableError(None, f"file too large; expected at most {MAX_BYTES} bytes")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise _UnreadableError(line, f"expected UTF-8 text, got byte 0x{text[error.start]:02x}") from None
    if found := _DIRECTIVE.search(decoded):  # libyaml compares each `%TAG` with all earlier ones
        line = len(decoded[: found.end()].splitlines())
        raise _UnreadableError(line, "directives are not supported, got a line that begins with %; remove it")
    try:
        root: yaml.Node | None = yaml.compose(decoded, _Loader)
    except yaml.reader.ReaderError as error:
        line = decoded.encode()[: error.position].count(b"\n") + 1
        raise _UnreadableError(line, f"control character U+{error.character:04X} is not allowed") from None
    except yaml.error.MarkedYAMLError as error:
        mark, reason = error.problem_mark or error.context_mark, error.problem or error.context
        if reason == "exceeded maximum nesting depth":  # libyaml 0.2.6 and later, in the parser
            reason = _TOO_DEEP
        raise _UnreadableError(mark and mark.line + 1, f"not readable as YAML: {reason}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise _UnreadableError(_line(root), "expected a mapping (key: value) at the top level")
    return root


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _Reading:
    """The state of turning one tree of nodes into data."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[Place, int] = {}
        self.problems: list[Problem] = []
        self._seen: set[int] = set()

    def read(self, node: yaml.Node, place: Place) -> Any:
        """Returns a node's data; what is wrong with it becomes a problem, and None."""
        if id(node) in self._seen:
            return self._complain(node, place, "aliases are not supported; write the value again")
        self._seen.add(id(node))
        if node.tag != _COLLECTION and node.tag not in _CONVERTERS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")[:60]
            return self._complain(node, place, f"tags are not supported, got {tag}; remove it")
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            self.lines |= {(*place, index): _line(item) for index, item in enumerate(node.value)}
            return [self.read(item, (*place, index)) for index, item in enumerate(node.value)]
        value = _CONVERTERS[node.tag](node.value)
        if isinstance(value, float) and not math.isfinite(value):
            return self._complain(
                node, place, f"expected a finite number, got {node.value[:SHOWN_CHARACTERS]}"
            )
        if isinstance(value, str) and "\0" in value:
            return self._complain(node, place, "expected text, got a NUL")
        return value

    def _read_mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._read_key(key_node, place)
            if key is None:
                continue
            inner = (*place, key)
            if key in result:
                self._complain(key_node, inner, f"duplicate key; it is already in line {self.lines[inner]}")
                continue
            self.lines[inner] = _line(key_node)
            result[key] = self.read(value_node, inner)
        return result

    def _read_key(self, node: yaml.Node, place: Place) -> str | None:
        if node.tag == _MERGE:
            self._complain(node, place, "merge keys (<<) are not supported; use defaults.yaml")
            return None
        is_scalar = isinstance(node, yaml.ScalarNode)
        key = self.read(node, place) if is_scalar else None
        if isinstance(key, str):
            return key
        text = node.value if is_scalar else "a list or mapping"
        self._complain(node, place, f'expected a string as key, got {text}; write it in quotes: "{text}"')
        return None

    def _complain(self, node: yaml.Node, place: Place, text: str) -> None:
        self.problems.append(Problem(self.file, _line(node), place, text))
