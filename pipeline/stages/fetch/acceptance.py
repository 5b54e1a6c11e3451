"""Checks in a child process that the installed ONNX Runtime accepts a model: some models crash it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.errors import ChildError, ChildTimeoutError, LoadError, SourceError
from ortprep.runtime.loading.session import CPU, build_session
from ortprep.runtime.probing.child import run_child
from ortprep.versions import installed_wheel

_REFUSALS = (
    (r"No Op registered for (\S+) with domain_version of (\d+)", "unknown operator {0} in opset {1}", None),
    (r"Fatal error: (\S+?)\(-?\d+\) is not a registered function/op", "unknown operator {0}", None),
    (
        r"Opset (\d+) is under development.*?Current official support for domain (\S+) is till opset (\d+)",
        "expected opset up to {2} of {1}, got {0}",
        "export the model with a lower opset, or {upgrade}",
    ),
    (
        r"Unsupported model IR version: (\d+), max supported IR version: (\d+)",
        "expected IR version up to {1}, got {0}",
        "set a lower ir_version at export, or {upgrade}",
    ),
)
"""Messages of ONNX Runtime 1.23 to 1.31, and what they mean."""


def check_accepted(model: Path, *, name: str, timeout_s: float | None = None) -> None:
    """Checks in a child process that the installed ONNX Runtime makes a session of a model.

    Raises:
        SourceError: ONNX Runtime refuses it, or crashes on it.
        ChildTimeoutError: The deadline passed.
    """
    request = {"model": str(model)}
    try:
        run_child("ortprep.stages.fetch.acceptance:accept_model", request, timeout_s=timeout_s)
    except LoadError as error:
        reason, hint = explain_refusal(error.message)
        raise SourceError(f"ONNX Runtime does not accept the model: {name}\n  {reason}", hint=hint) from error
    except ChildTimeoutError:
        raise
    except ChildError as error:
        raise SourceError(f"ONNX Runtime crashed on the model: {name}\n  {error.message}") from error


def accept_model(request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a session on CPU, unoptimised and without prepacking, so that mapped weights stay unread (child).

    Raises:
        LoadError: ONNX Runtime refuses the model.
    """
    options = SessionOptionsRecord(
        "ORT_DISABLE_ALL",
        attributes={"log_severity_level": 4},
        config_entries={"session.disable_prepacking": "1"},
    )
    build_session(SessionPlan(request["model"], options, (ProviderRecord(CPU),)))
    return {}


def explain_refusal(message: str) -> tuple[str, str | None]:
    """Returns what ONNX Runtime's message means, in one line, and a hint if there is one."""
    for pattern, meaning, hint in _REFUSALS:
        found = re.search(pattern, message, re.DOTALL)
        if found is not None:
            upgrade = f"pip install --upgrade {installed_wheel() or 'onnxruntime-gpu'}"
            return meaning.format(*found.groups()), hint and hint.format(upgrade=upgrade)
    # The rest after the places in ONNX Runtime's sources, which tell the user nothing.
    plain = re.sub(r"\S*onnxruntime\S*\.(?:cc|h):\d+ .*?\)(?: const)? (?=[A-Z])", "", message)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("ONNX Runtime cannot load"):
        del lines[0]
    return " ".join(lines)[:600], None
