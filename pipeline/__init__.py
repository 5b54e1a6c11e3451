"""ONNX models from exported to serving: prepare once, load in milliseconds.

Runtime jobs import `ortprep.runtime`; the build is driven by `doit prepare` or `ortprep prepare`. A name of
this package brings in what it needs when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ortprep.runtime.dropin.session import session

__version__ = "0.1.0"

__all__ = ["session"]

_HOMES = {
    "session": "ortprep.runtime.dropin.session",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
