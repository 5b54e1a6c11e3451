"""Usage data that ONNX Runtime sends to its maker, and how it is turned off."""

from __future__ import annotations

import os
import sys

TELEMETRY_VARIABLE, TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY", "1"
TELEMETRY_SINCE = (1, 29)
"""First version of ONNX Runtime whose official Linux wheels send anything."""

_TRUE = frozenset({"1", "true", "yes", "on"})


def is_telemetry_off(value: str) -> bool:
    """Says whether a value of the variable turns telemetry off (tried with 1.31.1): 0 and "" do not."""
    return value.strip().lower() in _TRUE


def disable_telemetry() -> None:
    """Turns ONNX Runtime's telemetry off in this process and its children; call it before the first import.

    Official Linux wheels since 1.29 upload usage data, model file names and weight hashes included, with a
    thread and a database below `~/.cache/Microsoft`. The variable turns all of that off, if it is set before
    the library is loaded (microsoft/onnxruntime#25573, #27379). A value that the user set stays.

    If the library is loaded already, only the children's telemetry is turned off, with one `RuntimeWarning`.
    """
    if TELEMETRY_VARIABLE in os.environ:
        return
    os.environ[TELEMETRY_VARIABLE] = TELEMETRY_OFF
    version = _loaded_version()
    if _sends_telemetry(version):
        _TOO_LATE.append(version)
        import warnings  # which ONNX Runtime has loaded; `logging` would cost 10 ms and more

        warnings.warn(
            f"ONNX Runtime {version} may send usage data: it was imported before ortprep could turn that "
            f"off; export {TELEMETRY_VARIABLE}={TELEMETRY_OFF}, or call ortprep.runtime.install() or load() "
            "before importing onnxruntime",
            RuntimeWarning,
            stacklevel=2,
        )


_TOO_LATE: list[str] = []
"""The version of ONNX Runtime that was loaded before its telemetry could be turned off here."""


def has_telemetry_thread() -> bool:
    """Says whether the ONNX Runtime of this process may have a thread that sends usage data.

    A forked child does not have that thread, and hangs at its exit, where the library waits for it (tried
    with 1.31.1 and 1.32.0).
    """
    is_off = is_telemetry_off(os.environ.get(TELEMETRY_VARIABLE, "")) and not _TOO_LATE
    return not is_off and _sends_telemetry(_loaded_version())


def _loaded_version() -> str:
    return str(getattr(sys.modules.get("onnxruntime"), "__version__", ""))


def _sends_telemetry(version: str) -> bool:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) >= TELEMETRY_SINCE
