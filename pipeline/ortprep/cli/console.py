"""Output for people and programs: data on stdout, talk on stderr."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeAlias

from rich import box
from rich.console import Console, JustifyMethod, OverflowMethod
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from ortprep.errors import PipelineError
from ortprep.quoting import printable, terminal_handler
from ortprep.tables import Table

_STDOUT, _STDERR = 1, 2
_PIPE_WIDTH = 100


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
    with _ignoring(BrokenPipeError, _STDOUT):
        sys.stdout.flush()
    with _ignoring(OSError, _STDERR):
        sys.stderr.flush()


def write_line(text: str) -> None:
    """Writes one line of data to stdout."""
    _write(printable(text, lines=False) + "\n")


class Talk(str):
    """Text for stderr."""


Block: TypeAlias = Table | Talk | str
"""What is written for people: a table, or a line."""


def write_blocks(blocks: Iterable[Block]) -> None:
    """Writes lines and tables."""
    for block in blocks:
        if isinstance(block, Talk):
            echo(block)
        elif isinstance(block, str):
            write_line(block)
        else:
            write_table(block)


def write_json(data: Any) -> None:
    """Writes JSON to stdout, all of it in ASCII."""
    # DEL is the one control character that JSON leaves as it is.
    _write(json.dumps(data, indent=1).replace("\x7f", "\\u007f") + "\n")


def format_yaml(data: Any) -> str:
    """Returns YAML in ASCII, keys in the order they have."""
    import yaml

    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=False)
    return text


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
        """Does not exit with 1, as rich does where it flushes what was written before: `_write` follows."""


def build_table(table: Table) -> RichTable:
    """Returns a table for a terminal, which wraps what does not fit and cuts nothing off.

    Figures stand to the right.
    """
    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading, is_numeric in zip(table.columns, table.numeric, strict=True):
        drawn.add_column(heading, justify="right" if is_numeric else "left", overflow="fold")
    for row in table.cells:
        drawn.add_row(*(cell.text for cell in row))
    return drawn


def write_table(table: Table) -> None:
    """Writes a table to stdout: at most as wide as the terminal, or as 100 characters in a pipe."""
    console = _PlainConsole(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    with console.capture() as capture:
        console.print(build_table(table))
    _write(capture.get())


def _write(text: str) -> None:
    """Writes data; a reader that went away has what it wanted, as `head` has, and the rest goes nowhere."""
    with _ignoring(BrokenPipeError, _STDOUT):
        sys.stdout.write(text)


def echo(text: str, stream: TextIO | None = None) -> None:
    """Writes talk to stderr, or to what stderr was; that it cannot be written does not stop the work."""
    with _ignoring(BrokenPipeError, _STDOUT):
        sys.stdout.flush()  # first what was said before, for a file that gets both
    with _ignoring(OSError, _STDERR):
        stream = stream or sys.stderr
        stream.write(printable(text) + "\n")
        stream.flush()


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
def _ignoring(kind: type[OSError], descriptor: int) -> Iterator[None]:
    """Ignores that a stream cannot be written; what Python still holds for it goes nowhere."""
    try:
        yield
    except kind:
        # It is written at exit, and would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
