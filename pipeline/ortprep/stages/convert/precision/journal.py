"""Trials of a search on disk: a line of JSON each, appended, so that a killed search goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ortprep.bundle.digest import digest_json
from ortprep.stages.convert.precision.search import Kept


class TrialsJournal:
    """The outcomes of a search's trials, by the set of kept nodes.

    Whatever else that depends on (model, conversion, gate, samples) must be equal for all trials of a file. A
    line that cannot be read is a trial that is made again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = dict(_read(path)) if path.exists() else {}

    def holds(self, kept: Kept, attempt: Callable[[Kept], bool]) -> bool:
        """Returns whether the gate held; attempts what is not known, and waits until the disk has it.

        Raises:
            OSError: The disk is full.
        """
        nodes = digest_json(sorted(kept))
        if nodes not in self._held:
            held = attempt(kept)
            line = json.dumps({"nodes": nodes, "count": len(kept), "held": held})
            with self._path.open("ab") as file:
                # On a line of its own: a killed run may have left half of one.
                file.write(f"\n{line}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            self._held[nodes] = held
        return self._held[nodes]


def _read(path: Path) -> Iterator[tuple[str, bool]]:
    for line in path.read_bytes().splitlines():
        with suppress(ValueError, TypeError, KeyError):
            trial = json.loads(line)
            yield trial["nodes"], trial["held"]
