"""The options of every listed version, read from `options.tsv`, and the check of their values.

Names and first versions were read from the Linux x86-64 wheels of ONNX Runtime 1.23 to 1.32 and from its
public header; CUDA's from the provider's library in 1.23.2, 1.27.0, 1.30.0 and 1.31.1, and for 1.32 from the
core library, since no CUDA provider of that version was published yet. Limits: ONNX Runtime takes a million
threads without a word and negative counts too, so 1024 is the most here, far above any machine; of
`session.moe.offload.*` it refuses unknown entries and every bad value itself (tried on 1.32.0).

Columns: the table (`session`, `attribute`, or CUDA's provider); name; first version; kind; default; values
(the range of a number, as in `4096..int32 by 4096`; choices with `|` between them; the regular expression of
a text); what a text looks like, in words; why a user must not set the option and what to do instead; its
effect.

An option with an `owner` is one that `ortprep` decides, or that reaches beyond a session: by it, ONNX Runtime
writes files, reads others than the bundle's or calls addresses. Effects speak of source graphs: a prepared
graph loads with optimisation off, so most options about rewriting a graph do nothing there.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ortprep.errors import SpecError
from ortprep.versions import parse_version

OLDEST = "1.23"
"""First ONNX Runtime version the tables describe; an older one is treated as this one."""

NEWEST = "1.32.0"
"""Last ONNX Runtime version the tables describe."""

MAX_VALUE_LENGTH = 4096
"""Longest value of a session config entry that every version takes (1.31 takes 8192; both measured)."""

Kind = Literal["switch", "integer", "number", "choice", "text"]
"""What values look like; a switch is `0` or `1`, since ONNX Runtime takes `true` for off in most places."""

_NAMED_LIMITS = {"": None, "int32": 2**31 - 1, "int64": 2**63 - 1}
"""Largest integers that ONNX Runtime keeps in 32 and in 64 bits; no text is no limit."""


@dataclass(frozen=True)
class Option:
    """One option of ONNX Runtime.

    Attributes:
        default: Behaviour of ONNX Runtime without it, as a value if there is one, else in words.
        since: First version that has it; `OLDEST` stands for that version or any before it.
        multiple: Number that an integer must be a multiple of; None for none.
        pattern: Regular expression the whole of a text must match.
        owner: Reason why a user must not set it and what to do instead; None if a user may.
    """

    name: str
    kind: Kind
    default: str
    effect: str
    since: str = OLDEST
    values: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    multiple: int | None = None
    pattern: str | None = None
    form: str = ""
    owner: str | None = None

    def exists_in(self, version: str) -> bool:
        """Returns whether that version of ONNX Runtime has the option; raises as `version_parts`."""
        return version_parts(self.since) <= max(version_parts(version), version_parts(OLDEST))

    @property
    def expected(self) -> str:
        """Description of its values, for a message."""
        if self.kind == "switch":
            return "0 or 1"
        if self.kind == "choice":
            return "one of " + ", ".join(value or "(empty)" for value in self.values)
        if self.kind == "text":
            return self.form or "text"
        described = _describe_range("an integer" if self.kind == "integer" else "a number", self)
        return described if self.multiple is None else f"{described}, a multiple of {self.multiple}"

    def accepts(self, text: str) -> bool:
        """Returns whether ONNX Runtime does what is meant with that value."""
        if len(text) > MAX_VALUE_LENGTH or "\0" in text:
            return False
        if self.kind == "switch":
            return text in ("0", "1")
        if self.kind == "choice":
            return text in self.values
        if self.kind == "text":
            fits = self.pattern is None or re.fullmatch(self.pattern, text) is not None
            return fits and text.isprintable()
        number = _parse_integer(text) if self.kind == "integer" else _parse_number(text)
        return number is not None and _is_within(number, self)


Table = Mapping[str, Option]


@functools.cache
def read_tables() -> Mapping[str, Table]:
    """Returns every option by table and name."""
    _, *lines = Path(__file__).with_name("options.tsv").read_text(encoding="utf-8").splitlines()
    tables: dict[str, dict[str, Option]] = {}
    for line in lines:
        table, name, since, kind, default, values, form, owner, effect = line.split("\t")
        limits = _parse_values(kind, values)  # type: ignore[arg-type]
        option = Option(name, kind, default, effect, since, form=form, owner=owner or None, **limits)  # type: ignore[arg-type]
        tables.setdefault(table, {})[name] = option
    return MappingProxyType({name: MappingProxyType(table) for name, table in tables.items()})


def _parse_values(kind: Kind, text: str) -> dict[str, Any]:
    """Returns the fields of an option that its column of values stands for."""
    if kind == "choice":
        return {"values": tuple(text.split("|"))}
    if kind not in ("integer", "number"):
        return {"pattern": text or None}
    limits, _, multiple = text.partition(" by ")
    number = int if kind == "integer" else float
    low, high = (_NAMED_LIMITS[end] if end in _NAMED_LIMITS else number(end) for end in limits.split(".."))
    return {"minimum": low, "maximum": high, "multiple": int(multiple) if multiple else None}


def format_option(value: str | int | float | bool) -> str:
    """Returns a YAML scalar as the string ONNX Runtime takes: `True` becomes `1`."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def version_parts(version: str) -> tuple[int, ...]:
    """Returns the numeric parts of a version without trailing zeros; `1.31.0.dev2+cpu` gives `(1, 31)`.

    Raises:
        SpecError: The text is no version.
    """
    parts = parse_version(version)
    if parts is None:
        raise SpecError(
            f"not a version of ONNX Runtime: {version!r}\n  expected numbers and dots, as in {NEWEST}"
        )
    return parts


def _parse_integer(text: str) -> int | None:
    # int() would also take blanks, underscores and digits of other scripts. Nothing ONNX Runtime parses has
    # more than 20 digits.
    return int(text) if re.fullmatch(r"[0-9]{1,20}|-[1-9][0-9]{0,19}", text) else None


def _parse_number(text: str) -> float | None:
    if not re.fullmatch(r"-?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?", text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def _is_within(number: float, option: Option) -> bool:
    low = -math.inf if option.minimum is None else option.minimum
    high = math.inf if option.maximum is None else option.maximum
    return low <= number <= high and (option.multiple is None or number % option.multiple == 0)


def _describe_range(noun: str, option: Option) -> str:
    if option.minimum is not None and option.maximum is not None:
        return f"{noun} from {option.minimum} to {option.maximum}"
    if option.minimum is not None:
        return f"{noun}, at least {option.minimum}"
    return noun
