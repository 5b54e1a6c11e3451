"""What jobs import: `load` opens a bundle as an `onnxruntime.InferenceSession`, `load_progressive` as two.

Importing this package costs next to nothing; a name brings in what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.runtime.hardware import Hardware, read_hardware
    from pipeline.runtime.loading import load, open_bundle
    from pipeline.runtime.opening import OpenedBundle
    from pipeline.runtime.progressive import load_progressive
    from pipeline.runtime.progressive_session import ProgressiveSession
    from pipeline.runtime.selection import Selection, select_variant
    from pipeline.runtime.session import SessionPlan, build_session

__all__ = [
    "Hardware",
    "OpenedBundle",
    "ProgressiveSession",
    "Selection",
    "SessionPlan",
    "build_session",
    "load",
    "load_progressive",
    "open_bundle",
    "read_hardware",
    "select_variant",
]

_HOMES = {
    "Hardware": "hardware",
    "OpenedBundle": "opening",
    "ProgressiveSession": "progressive_session",
    "Selection": "selection",
    "SessionPlan": "session",
    "build_session": "session",
    "load": "loading",
    "load_progressive": "progressive",
    "open_bundle": "loading",
    "read_hardware": "hardware",
    "select_variant": "selection",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
