"""ONNX models from exported to serving: prepare once, start sooner.

Runtime jobs import `ortprep.runtime`; the build is driven by `doit prepare`, `ortprep prepare` or `prepare`.
A name of this package brings in what it needs when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ortprep.build.observers import BuildEvent
    from ortprep.preparation import prepare
    from ortprep.runtime.dropin.session import session

__version__ = "0.1.0"

__all__ = ["BuildEvent", "prepare", "session"]

_HOMES = {
    "BuildEvent": "ortprep.build.observers",
    "prepare": "ortprep.preparation",
    "session": "ortprep.runtime.dropin.session",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in ("ortprep", "numpy", "onnxruntime"):
            raise
        from ortprep.errors import MissingExtraError
        from ortprep.versions import install_command

        problem = f"ortprep.{name} needs {error.name}, which is not installed"
        raise MissingExtraError(problem, hint=install_command("build")) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
