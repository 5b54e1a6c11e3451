"""Publishes or pulls in a process that kills itself.

`python -m tests.registry.dying ACTION REGISTRY PATH NAME STEP`
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ortprep.registry.cache import Cache
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.garbage_collection import RetentionPolicy, collect
from ortprep.registry.publish import publish
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef, open_registry
from ortprep.transport.transfer import Progress
from tests.registry.builders import Watched

_COUNTED = re.compile("(delete|list|open|put)_(file|ref|refs)|delete|has_file|progress|sweep")


def main(action: str, registry: str, path: str, name: str, step: str) -> None:
    steps = iter(range(int(step)))

    def count(name: str, *_: object) -> None:
        """Ends the process with SIGKILL before a change, as a machine that loses power."""
        if _COUNTED.fullmatch(name) and next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    opened = open_registry(registry)
    folder: Any = getattr(opened, "_folder", None)
    if folder is not None:
        folder.delete = Watched(folder, count).delete
    backend: Any = Watched(opened, count)
    catalogue = Catalogue(backend, Cache(Path(path).parent / "cache"))

    def observe(progress: Progress) -> None:
        count("progress")

    actions: dict[str, Callable[[], object]] = {
        "publish": lambda: publish(Path(path), catalogue, observer=observe),
        "pull": lambda: pull(PullRequest(VersionRef(name, None)), catalogue, Path(path), observer=observe),
        "collect": lambda: collect(name, catalogue, policy=RetentionPolicy(0, 0, 0), dry_run=False),
    }
    actions[action]()


if __name__ == "__main__":
    main(*sys.argv[1:])
