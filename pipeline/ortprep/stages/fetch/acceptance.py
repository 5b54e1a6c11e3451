"""Checks in a child process that the installed ONNX Runtime accepts a model: some models crash it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.children.child import run_child
from ortprep.errors import ChildError, ChildTimeoutError, LoadError, SourceError
from ortprep.runtime.loading.session import CPU, build_session


def check_accepted(model: Path, *, name: str, timeout_s: float | None = None) -> None:
    """Checks in a child process that the installed ONNX Runtime makes a session of a model.

    Raises:
        SourceError: ONNX Runtime refuses it, or crashes on it.
        ChildTimeoutError: The deadline passed.
    """
    request = {"model": str(model)}
    try:
        run_child(accept_model, request, timeout_s=timeout_s)
    except LoadError as error:
        reason = plain_refusal(error.message)
        raise SourceError(f"ONNX Runtime does not accept the model: {name}\n  {reason}") from error
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


def plain_refusal(message: str) -> str:
    """Returns ONNX Runtime's message in one line, without places in its sources."""
    plain = re.sub(r"\S*onnxruntime\S*\.(?:cc|h):\d+ .*?\)(?: const)? (?=[A-Z])", "", message)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("ONNX Runtime cannot load"):
        del lines[0]
    return " ".join(lines)[:600]
