"""Runs a function as soon as a Python process has imported a module, in a program that is left as it is.

`startup_environment` makes an environment for a program. Every Python process that starts in it, the
program's children included, runs the function that the environment names once it has imported ONNX Runtime.
The process finds `startup/sitecustomize.py` on `PYTHONPATH`, which calls `start`.

This module runs at the start of all those processes, so it imports nothing that Python has not loaded yet.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

STARTUP_VARIABLE = "ORTPREP_AT_IMPORT"
"""Names the function that runs once ONNX Runtime is imported, as `module:function`."""

_STARTUP_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
_PATH = "PYTHONPATH"


def startup_environment(function: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment whose Python processes run a function once they have imported ONNX Runtime.

    ONNX Runtime's telemetry is off in it, unless `environment` says otherwise. Python's options `-E`, `-I`
    and `-S` ignore it, as they ignore `PYTHONPATH` or `sitecustomize`.

    Args:
        function: `module:function`; it takes the module `onnxruntime`.
        environment: What else the environment has.
    """
    from ortprep.telemetry import TELEMETRY_OFF, TELEMETRY_VARIABLE

    current = environment.get(_PATH)
    folders = [path for path in current.split(os.pathsep) if path != _STARTUP_FOLDER] if current else []
    return {
        TELEMETRY_VARIABLE: TELEMETRY_OFF,
        **environment,
        _PATH: os.pathsep.join([_STARTUP_FOLDER, *folders]),
        STARTUP_VARIABLE: function,
    }


def start() -> None:
    """Registers the function that the environment names; `sitecustomize` calls it."""
    function = os.environ.get(STARTUP_VARIABLE)
    if function:
        call_after_import("onnxruntime", lambda module: _find_function(function)(module))


def call_after_import(name: str, callback: Callable[[ModuleType], object]) -> None:
    """Calls a function with a module, once: now if it is imported, else as soon as it is.

    Several functions for one module run in the order in which they were registered. What one raises, the
    `import` statement raises.

    Args:
        name: Name of the module, with dots.
        callback: Takes the module after its own code has run.
    """
    module = sys.modules.get(name)
    if module is None:
        # In front of the finders of earlier calls, whose functions then run first.
        sys.meta_path.insert(0, _Finder(name, callback))
    else:
        callback(module)


def _find_function(function: str) -> Callable[[ModuleType], object]:
    module, separator, name = function.partition(":")
    if not separator:
        raise ImportError(f"bad {STARTUP_VARIABLE}: {function!r}\n  expected module:function")
    __import__(module)
    resolved: Callable[[ModuleType], object] = getattr(sys.modules[module], name)
    return resolved


class _Finder:
    """Finds one module where the other finders do, and gives it a loader that calls back."""

    def __init__(self, name: str, callback: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns what the finders after this one find, for its own module only."""
        if name != self._name:
            return None
        following = sys.meta_path[sys.meta_path.index(self) + 1 :]
        # Python passes over finders of before 3.4, which have no `find_spec`, too.
        specs = (finder.find_spec(name, path, target) for finder in following if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._finish)  # type: ignore[assignment]
        return spec

    def _finish(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._callback(module)


class _Loader:
    """Loads a module as its own loader does, and calls back when that is done."""

    def __init__(self, loader: Any, callback: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns what the module's own loader returns."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, which sees its own loader, and calls back."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback(module)
