"""Runs at the start of every Python process of `ortprep run`: Python imports a module of this name by itself.

It is found on `PYTHONPATH`, in a folder of its own. See `ortprep.runtime.dropin.import_hook`.
"""

import os
import sys


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    if sys.version_info >= (3, 11):  # noqa: UP036 - a program may start any interpreter
        _register(os.path.abspath(os.path.join(here, *[os.pardir] * 4)))
    _run_next()


def _register(packages: str) -> None:
    """Starts the hook of the drop-in, from this folder if the interpreter has no ortprep."""
    try:
        from ortprep.runtime.dropin import import_hook
    except ModuleNotFoundError:
        # The interpreter of another environment, which gets this package and no other of this folder.
        sys.path.append(packages)
        try:
            from ortprep.runtime.dropin import import_hook
        finally:
            sys.path.remove(packages)
    import_hook.start()


def _run_next() -> None:
    """Runs the `sitecustomize` that this one hides, the application's or the system's, if there is one."""
    own = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own)


if __name__ == "sitecustomize":
    _start()
