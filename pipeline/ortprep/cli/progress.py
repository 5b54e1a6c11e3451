"""Progress of builds and transfers: lines of text, and on a terminal bars that move."""

from __future__ import annotations

import sys
import time
from collections import Counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from ortprep.build.observers import BuildEvent, EventKind
from ortprep.cli.console import echo
from ortprep.quoting import printable
from ortprep.transport.transfer import Progress


class _Bars:
    """Rows of progress on the terminal that stderr is; nothing where it is none, or while there is no row."""

    def __init__(self, *columns: ProgressColumn) -> None:
        # doit puts a writer of its own in the place of sys.stderr while a task runs, and rich would put one
        # in the place of that: the stream is taken before, and rich has to leave it alone.
        self.stream = sys.stderr
        self._shown = RichProgress(
            *columns,
            console=Console(file=self.stream),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            speed_estimate_period=24 * 3600.0,
            disable=not self.stream.isatty(),
        )
        self._rows: dict[str, TaskID] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def show(self, name: str, *, completed: float = 0, total: float | None = None) -> None:
        """Shows a row, with how much of it is done; a total of None is not known yet."""
        self._shown.start()  # nothing if it has begun
        if name not in self._rows:
            self._rows[name] = self._shown.add_task(printable(name, lines=False), total=total)
        self._shown.update(self._rows[name], completed=completed, total=total)

    def remove(self, name: str) -> None:
        """Takes a row away, if it is there."""
        if name in self._rows:
            self._shown.remove_task(self._rows.pop(name))

    def stop(self) -> None:
        """Ends what is shown."""
        self._shown.stop()

    def write(self, text: str) -> None:
        """Writes text above the rows, or where stderr goes if there are none."""
        if self._shown.live.is_started:
            self._shown.console.print(
                printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True
            )
        else:
            echo(text, self.stream)


_NAME = TextColumn("{task.description}", markup=False)


class BuildObserver:
    """Shows how a build goes: lines for what tasks say and become, and on a terminal what is running now.

    A running task is shown with the time it has taken, how much of it is done and what is left.
    """

    def __init__(self) -> None:
        self._bars = _Bars(
            SpinnerColumn(), _NAME, TimeElapsedColumn(), TaskProgressColumn(), TimeRemainingColumn()
        )
        self._started_s: dict[str, float] = {}
        self._counts: Counter[EventKind] = Counter()

    def __call__(self, event: BuildEvent) -> None:
        """Shows an event: a row for a running task, a line for what it says or became, counts at the end."""
        name, now_s = event.task, time.monotonic()
        self._counts[event.kind] += 1
        match event.kind:
            case "started":
                self._started_s[name] = now_s
                self._bars.show(name)
            case "progressed":
                if name in self._bars:
                    self._bars.show(name, completed=event.fraction, total=1.0)
            case "said":
                self._bars.write(f"  {name}: {event.text}")
            case "finished":
                self._bars.write(f"done {name} ({now_s - self._started_s.get(name, now_s):.1f} s)")
                self._bars.remove(name)
            case "failed":
                self._bars.write(f"FAILED {name}\nerror: {event.text}")
                self._bars.remove(name)
            case "ended":
                self._bars.stop()
                self._write_counts()

    def _write_counts(self) -> None:
        count = self._counts
        if count["finished"] or count["current"] or count["failed"]:
            failed = f", {count['failed']} failed, {count['skipped']} not tried" if count["failed"] else ""
            self._bars.write(f"{count['finished']} done, {count['current']} up to date{failed}")


class TransferBar:
    """Shows a transfer's progress, on a terminal only."""

    def __init__(self) -> None:
        self._bars = _Bars(_NAME, BarColumn(), DownloadColumn(), TransferSpeedColumn())

    def __enter__(self) -> TransferBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, progress: Progress) -> None:
        """Shows how far the transfer is."""
        self._bars.show(progress.what, completed=progress.done_bytes, total=progress.total_bytes)
