"""Fallback steps: they are tried in order until one holds."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from ortprep.errors import ChildError, LoadError, StageError

TAKEN = "taken"
"""Outcome of the step that holds."""

_MAX_MESSAGE = 4000
"""Characters of a message that are looked at: it has names of the model, which may be megabytes."""

_PLACE = re.compile(r"(?<!\S)\S*onnxruntime\S*\.(?:cc|h):\d+ .*?(?:\)(?: const)? (?=[A-Z])| was false\. )")

REFUSALS = (LoadError, ChildError, StageError)
"""Errors that mean that a step does not hold."""


def describe_failures(attempts: Iterable[tuple[str, str]]) -> str:
    """Returns steps and their outcomes as indented lines of an error; equal outcomes share a line."""
    steps: dict[str, list[str]] = {}
    for step, outcome in attempts:
        steps.setdefault(outcome.strip(), []).append(step)
    lines = (f"{', '.join(names)}: {outcome}" for outcome, names in steps.items())
    return textwrap.indent("\n".join(lines), "  ")


def plain_refusal(message: str) -> str:
    """Returns ONNX Runtime's message in one line, without places in its sources."""
    plain = _PLACE.sub("", message[:_MAX_MESSAGE])
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("ONNX Runtime cannot load"):
        del lines[0]
    return " ".join(lines)[:600]
