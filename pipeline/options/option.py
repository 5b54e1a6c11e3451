"""What is known of one option, and whether a value suits it."""

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

WHEELS = (
    "literal in the Linux x86-64 wheels; searched were 1.23.0, 1.23.2, 1.24.1, 1.24.2, 1.24.4, 1.25.0, "
    "1.25.1, 1.26.0, 1.27.0, 1.28.0, 1.29.0, 1.30.0, 1.31.0, 1.31.1 and 1.32.0"
)
NEWEST_WHEEL = (
    "literal in the Linux x86-64 wheel of onnxruntime 1.32.0, not in that of 1.31.1; values as a session of "
    "1.32.0 takes and refuses them; effects by names and messages, for want of documentation"
)
HEADER = "named in ONNX Runtime's public header; not in the Linux x86-64 wheels, where nothing reads it"
CUDA_LIBRARY = "literal in the CUDA provider's library of onnxruntime-gpu 1.23.2, 1.27.0, 1.30.0 and 1.31.1"
CUDA_INTERVAL = (
    "literal in the CUDA provider's library of onnxruntime-gpu 1.30.0, not in 1.27.0; "
    "1.28 and 1.29 were not searched, so it may be there already"
)
CUDA_LATEST = "literal in the CUDA provider's library of onnxruntime-gpu 1.31.1, not in 1.30.0"
CUDA_CORE = (
    "named in the core library of onnxruntime 1.32.0, not in 1.31.1; its CUDA provider was not published "
    "yet, so nothing was tried"
)
ATTRIBUTE = "attribute of onnxruntime.SessionOptions in 1.23.2, 1.31.1 and 1.32.0"


@dataclass(frozen=True)
class Option:
    """One option of ONNX Runtime.

    Attributes:
        default: What ONNX Runtime does without it, as a value if there is one, else in words.
        since: First version that has it; `OLDEST` stands for that version or any before it.
        until: First version that has it no longer, None if every version up to `NEWEST` has it.
        multiple: What an integer must be a multiple of; None if any will do.
        pattern: Regular expression the whole of a text must match.
        owner: Why a user must not set it and what to do instead; None if a user may.
        source: Where `name` and `since` come from.
    """

    name: str
    kind: Kind
    default: str
    effect: str
    since: str = OLDEST
    until: str | None = None
    values: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    multiple: int | None = None
    pattern: str | None = None
    form: str = ""
    owner: str | None = None
    source: str = WHEELS

    def exists_in(self, version: str) -> bool:
        """Tells whether that version of ONNX Runtime has the option; raises as `version_parts`."""
        parts = max(version_parts(version), version_parts(OLDEST))
        gone = self.until is not None and parts >= version_parts(self.until)
        return version_parts(self.since) <= parts and not gone

    @property
    def expected(self) -> str:
        """What values look like, for a message."""
        if self.kind == "switch":
            return "0 or 1"
        if self.kind == "choice":
            return "one of " + ", ".join(value or "(empty)" for value in self.values)
        if self.kind == "text":
            return self.form or "text"
        described = _describe_range("an integer" if self.kind == "integer" else "a number", self)
        return described if self.multiple is None else f"{described}, a multiple of {self.multiple}"

    def accepts(self, text: str) -> bool:
        """Tells whether ONNX Runtime does what is meant with that value."""
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


def switch(
    name: str,
    default: str,
    effect: str,
    *,
    since: str = OLDEST,
    owner: str | None = None,
    source: str = WHEELS,
) -> Option:
    """Returns an option that is `0` or `1`."""
    return Option(name, "switch", default, effect, since=since, owner=owner, source=source)


def format_option(value: str | int | float | bool) -> str:
    """Returns a YAML scalar as the string ONNX Runtime takes: `True` becomes `1`."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def version_parts(version: str) -> tuple[int, ...]:
    """Returns the numeric parts of a version without trailing zeros; `1.31.0.dev2+cpu` gives `(1, 31)`.

    Raises:
        SpecError: That is not a version.
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
