"""What people see: data on stdout, talk on stderr, moving parts on a terminal only."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich import box
from rich.console import Console, JustifyMethod, OverflowMethod
from rich.progress import (
    BarColumn,
    DownloadColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from ortprep.errors import PipelineError
from ortprep.quoting import printable, terminal_handler
from ortprep.registry.transfer import Progress
from ortprep.tables import Table

_STDOUT, _STDERR = 1, 2
_PIPE_WIDTH = 100
_BAR_CELLS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def start_streams() -> None:
    """Sees to it that stdout and stderr are there, and that their readers do not decide how we end."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Not every terminal can show ×, ± or names in other scripts; a question mark beats no answer.
        sys.stdout.reconfigure(errors="replace")
    atexit.register(_end_streams)


def _end_streams() -> None:
    # Otherwise the interpreter does it, and exits with 120 where it cannot.
    with _ignoring_broken_pipe():
        sys.stdout.flush()
    with _ignoring_errors():
        sys.stderr.flush()


def write_line(text: str) -> None:
    """Writes one line of data to stdout."""
    with _ignoring_broken_pipe():
        sys.stdout.write(printable(text, lines=False) + "\n")


def write_text(text: str) -> None:
    """Writes a line of text to stdout, wrapped to the terminal's width, or to 100 characters in a pipe."""
    line = printable(text, lines=False)
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    lines = textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    with _ignoring_broken_pipe():
        sys.stdout.write("\n".join(lines) + "\n")


def write_json(data: Any) -> None:
    """Writes JSON to stdout, all of it in ASCII."""
    # DEL is the one control character that JSON leaves as it is.
    text = json.dumps(data, indent=1).replace("\x7f", "\\u007f")
    with _ignoring_broken_pipe():
        sys.stdout.write(text + "\n")


def write_yaml(data: Any) -> None:
    """Writes YAML to stdout, keys in the order they have."""
    import yaml

    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=False)
    with _ignoring_broken_pipe():
        sys.stdout.write(text)


class _PlainConsole(Console):
    """Takes no string for markup or an emoji, and shows each on one line."""

    def render_str(
        self,
        text: str,
        *,
        style: str | Style = "",
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        **_: Any,
    ) -> Text:
        """Returns a string as it is, apart from what a terminal would take for orders."""
        return Text(printable(text, lines=False), style=style, justify=justify, overflow=overflow)

    def on_broken_pipe(self) -> None:
        """Goes on: rich itself ends the process when nobody reads what was written before a table."""
        _redirect_to_null(_STDOUT)


def build_table(table: Table) -> RichTable:
    """Returns a table for a terminal, which wraps what does not fit and cuts nothing off.

    Figures stand to the right. A table with bars gets them as a last column.
    """
    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading, is_numeric in zip(table.columns, table.numeric, strict=True):
        drawn.add_column(heading, justify="right" if is_numeric else "left", overflow="fold")
    rows = [[cell.text for cell in row] for row in table.cells]
    if table.bars is not None:
        index = table.columns.index(table.bars)
        drawn.add_column("", no_wrap=True)
        bars = draw_waterfall([row[index].value or 0.0 for row in table.cells])
        rows = [[*row, bar] for row, bar in zip(rows, bars, strict=True)]
    for row in rows:
        drawn.add_row(*row)
    return drawn


def draw_waterfall(figures: Sequence[float], *, cells: int = _BAR_CELLS) -> tuple[str, ...]:
    """Returns a bar for each figure; each begins where the one before it ended, and all fill the width."""
    total, begin, bars = sum(figures) or 1.0, 0.0, []
    for figure in figures:
        eighths = round(figure / total * cells * 8)
        whole, part = divmod(eighths, 8)
        bars.append(" " * int(begin / total * cells) + ("█" * whole + _EIGHTHS[part].strip() or "▏"))
        begin += figure
    return tuple(bars)


def write_table(table: Table | RichTable) -> None:
    """Writes a table to stdout: at most as wide as the terminal, or as 100 characters in a pipe."""
    console = _PlainConsole(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    with console.capture() as capture:
        console.print(build_table(table) if isinstance(table, Table) else table)
    with _ignoring_broken_pipe():
        sys.stdout.write(capture.get())


def echo(text: str) -> None:
    """Writes talk to stderr."""
    with _ignoring_errors():
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()


INTERRUPTED = "interrupted; what was finished is kept, what was not is done again by the next run"


def exit_when_interrupted() -> None:
    """Has an interrupt end a program that is not ours, as doit, in one line and exit code 130.

    A program that was started with interrupts ignored goes on ignoring them.
    """

    def end(number: int, frame: object) -> NoReturn:  # noqa: ARG001 - what a signal handler takes
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # who cannot wait for the end interrupts again
        with contextlib.suppress(OSError):
            os.write(_STDERR, f"{INTERRUPTED}\n".encode())  # sys.stderr may be in the middle of a write
        sys.exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def echo_error(error: PipelineError) -> None:
    """Writes an error to stderr: what failed, expected and got, and a hint."""
    echo(f"error: {error}")


def start_logging(level: str | None) -> None:
    """Sends the library's log to stderr, at `level` or `$ORTPREP_LOG` or warnings.

    Of other packages only warnings appear: HTTP and cloud clients log addresses and tokens at lower levels.
    """
    name = (level or os.environ.get("ORTPREP_LOG") or "warning").upper()
    handler = terminal_handler("%(levelname)s %(name)s: %(message)s")
    number = logging.getLevelNamesMapping().get(name, logging.WARNING)
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler])
    logging.getLogger("ortprep").setLevel(number)


@contextlib.contextmanager
def _ignoring_broken_pipe() -> Iterator[None]:
    """For data: a reader that went away has what it wanted, as `head` has; the rest goes nowhere."""
    try:
        yield
    except BrokenPipeError:
        _redirect_to_null(_STDOUT)


@contextlib.contextmanager
def _ignoring_errors() -> Iterator[None]:
    """For talk: that it cannot be written is no reason to stop the work, or to call it failed."""
    try:
        yield
    except OSError:
        _redirect_to_null(_STDERR)


def _redirect_to_null(descriptor: int) -> None:
    # What Python still holds for it is written at exit, and would fail again.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class BuildObserver:
    """Shows how a build goes: a line per finished task, and on a terminal what is running now.

    A running task is shown with the time it has taken, how much of it is done and what is left.
    """

    def __init__(self) -> None:
        # doit puts a writer of its own in the place of sys.stderr while a task runs, and rich would put one
        # in the place of that: the stream is taken before, and rich is told to leave it alone.
        self._stream = sys.stderr
        self._pid = os.getpid()
        self._started_s: dict[str, float] = {}
        self._rows: dict[str, TaskID] = {}
        self._current = 0
        self._done = 0
        self._failed = 0
        self._skipped = 0
        self._bar: RichProgress | None = None

    def started(self, task: str) -> None:
        """Shows a task as running."""
        self._started_s[task] = time.monotonic()
        if not self._stream.isatty() or not self._is_own_process():
            return
        if self._bar is None:
            self._bar = RichProgress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                speed_estimate_period=24 * 3600.0,
            )
            self._bar.start()
        self._rows[task] = self._bar.add_task(printable(task, lines=False), total=None)

    def said(self, task: str, line: str) -> None:
        """Writes a line of a running task."""
        self._line(f"  {task}: {line}")

    def progressed(self, task: str, fraction: float) -> None:
        """Takes how much of a running task is done, for what is shown of it."""
        if self._bar is not None and task in self._rows and self._is_own_process():
            self._bar.update(self._rows[task], total=1.0, completed=fraction)

    def finished(self, task: str) -> None:
        """Writes that a task is done."""
        self._done += 1
        now_s = time.monotonic()
        self._line(f"done {task} ({now_s - self._started_s.get(task, now_s):.1f} s)")
        self._remove(task)

    def current(self, task: str) -> None:  # noqa: ARG002
        """Counts a task that was up to date."""
        self._current += 1

    def failed(self, task: str, message: str) -> None:
        """Writes why a task failed."""
        self._failed += 1
        self._line(f"FAILED {task}\nerror: {message}")
        self._remove(task)

    def skipped(self, task: str, message: str) -> None:  # noqa: ARG002
        """Counts a task that was not tried, since one before it failed."""
        self._skipped += 1

    def ended(self) -> None:
        """Writes the sum."""
        for task in list(self._rows):
            self._remove(task)
        if self._done or self._current or self._failed:
            failed = f", {self._failed} failed, {self._skipped} not tried" if self._failed else ""
            self._line(f"{self._done} done, {self._current} up to date{failed}")

    def _is_own_process(self) -> bool:
        """Says whether this is the process that shows something; a fork of it has no thread that would."""
        return os.getpid() == self._pid

    def _line(self, text: str) -> None:
        line = printable(text)
        with _ignoring_errors():
            if self._bar is not None and self._is_own_process():
                self._bar.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
            else:
                self._stream.write(line + "\n")
                self._stream.flush()

    def _remove(self, task: str) -> None:
        row = self._rows.pop(task, None)
        if self._bar is None or row is None or not self._is_own_process():
            return
        self._bar.remove_task(row)
        if not self._rows:
            self._bar.stop()
            self._bar = None


class TransferBar:
    """Shows a transfer's progress, on a terminal only."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> TransferBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Takes how far the transfer is."""
        if not self._stream.isatty():
            return
        if self._bar is None:
            description = TextColumn("{task.description}", markup=False)
            columns = (description, BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = RichProgress(*columns, console=Console(file=self._stream), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(printable(progress.what, lines=False), total=progress.total_bytes)
        assert self._task is not None
        self._bar.update(self._task, completed=progress.done_bytes, total=progress.total_bytes)
