"""One option of ONNX Runtime, and the check of its values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

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
