"""Trials of a search on disk: a line of JSON each, appended, so that a killed search goes on where it was.

A process killed at any instant loses the trial it was at and nothing else: half a line is removed when the
journal is opened again, and a line that cannot be read is a trial that is made again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.atomic import sync_folder
from ortprep.bundle.codec import canonical_json, decode, encode, parse_json
from ortprep.bundle.digest import digest_json
from ortprep.bundle.file_memory import open_regular
from ortprep.errors import BundleError, StageError
from ortprep.stages.convert.precision.search import Kept

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrialOutcome:
    """Result of a trial.

    Attributes:
        held: Whether the gate held.
        failures: What the gate says against it, a line each; for people.
    """

    held: bool
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class _JournalEntry:
    """A trial that is over: the digest of the sorted names that were kept, and how many they are."""

    nodes: str
    count: int
    outcome: TrialOutcome


class TrialsJournal:
    """The outcomes of a search's trials, by the set of kept nodes.

    Whatever else that depends on (model, conversion, gate, samples) must be equal for all trials of a file.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it.

        Raises:
            StageError: It cannot be read or written.
        """
        self._path = path
        try:
            self._known = _read(_mend(path))
        except OSError as error:
            raise StageError(
                f"cannot open the journal of trials: {path}\n  {error.strerror or error}", hint=f"rm {path}"
            ) from error

    def find(self, kept: Kept) -> TrialOutcome | None:
        """Returns the outcome of a finished trial; None if there is none."""
        return self._known.get(_digest(kept))

    def record(self, kept: Kept, outcome: TrialOutcome) -> None:
        """Appends a finished trial, and waits until the disk has it.

        Raises:
            OSError: The disk is full.
        """
        line = _JournalEntry(_digest(kept), len(kept), outcome)
        with self._path.open("ab") as file:
            file.write(canonical_json(encode(line)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._known[line.nodes] = outcome


def journalled(attempt: Callable[[Kept], TrialOutcome], journal: TrialsJournal) -> Callable[[Kept], bool]:
    """Returns the `holds` of a search: it attempts and records what the journal does not know."""

    def holds(kept: Kept) -> bool:
        outcome = journal.find(kept)
        if outcome is None:
            outcome = attempt(kept)
            journal.record(kept, outcome)
        return outcome.held

    return holds


def _digest(kept: Kept) -> str:
    return digest_json(sorted(kept))


def _mend(path: Path) -> bytes:
    """Removes the half line that a killed run left, and returns the whole lines."""
    if not path.exists():
        path.touch()
        sync_folder(path.parent)
    with open_regular(path) as file:
        text = file.read()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)
    return text[:whole]


def _read(text: bytes) -> dict[str, TrialOutcome]:
    known = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            trial = decode(_JournalEntry, parse_json(line, name=f"line {number}"))
        except BundleError as error:
            log.debug("line %d of the journal left out: %s", number, error)
            continue
        known[trial.nodes] = trial.outcome
    return known
