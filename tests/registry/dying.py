"""Publishes or pulls in a process that kills itself.

`python -m tests.registry.dying ACTION REGISTRY PATH NAME STEP`
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ortprep.registry.backend import Backend
from ortprep.registry.cache import Cache
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.garbage_collection import RetentionPolicy, collect
from ortprep.registry.publish import publish
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef, open_registry
from ortprep.transport.transfer import Progress

_COUNTED = frozenset(
    {
        "delete_ref",
        "has_file",
        "list_refs",
        "open_file",
        "open_ref",
        "put_file",
        "put_ref",
        "sweep",
    }
)


class Dying:
    """A backend that ends the process with SIGKILL before its n-th change, as a machine that loses power."""

    def __init__(self, backend: Backend, step: int) -> None:
        self._backend = backend
        self._left = step

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if name not in _COUNTED:
            return value

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return value(*args, **kwargs)

        return counted

    def count(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main(action: str, registry: str, path: str, name: str, step: str) -> None:
    backend: Any = Dying(open_registry(registry), int(step))
    folder = getattr(backend, "_folder", None)
    if folder is not None:
        delete = folder.delete
        folder.delete = lambda path: (backend.count(), delete(path))
    catalogue = Catalogue(backend, Cache(Path(path).parent / "cache"))

    def observe(progress: Progress) -> None:
        backend.count()

    actions: dict[str, Callable[[], object]] = {
        "publish": lambda: publish(Path(path), catalogue, observer=observe),
        "pull": lambda: pull(PullRequest(VersionRef(name, None)), catalogue, Path(path), observer=observe),
        "collect": lambda: collect(name, catalogue, policy=RetentionPolicy(0, 0, 0), dry_run=False),
    }
    actions[action]()


if __name__ == "__main__":
    main(*sys.argv[1:])
