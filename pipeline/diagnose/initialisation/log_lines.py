"""The lines that ONNX Runtime logs while it makes a session. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

_LINE = re.compile(
    r"(?:\x1b\[[0-9;]*m)?"
    r"(?P<second>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.(?P<fraction>\d{1,9}) "
    r"\[[A-Z]:[^,\]]*, (?P<file>[^\s:\]]+):\d+ (?P<function>[^\]]*)\] (?P<message>.*)"
)
_QUARTER_NS = 15 * 60 * 10**9


@dataclass(frozen=True)
class LogLine:
    """A line of the log.

    Attributes:
        at_ns: When it was written, nanoseconds since 1970 by the clock that the log shows.
        file: Source file of ONNX Runtime.
        function: Function in it.
        message: What it says, its first line.
    """

    at_ns: int
    file: str
    function: str
    message: str


def parse_log(text: str, *, begin_ns: int) -> tuple[LogLine, ...]:
    """Returns the lines of a log, its clock set right; what is no line of ONNX Runtime's is left out.

    ONNX Runtime writes the local time without saying which it is. Zones differ by quarters of an hour, so the
    first line, which is written within minutes of `begin_ns`, tells the zone.

    Args:
        text: As ONNX Runtime writes it to stderr, colours and all.
        begin_ns: When the session was asked for, nanoseconds since 1970, UTC.
    """
    lines = tuple(_parse_lines(text))
    if not lines:
        return ()
    zone_ns = round((lines[0].at_ns - begin_ns) / _QUARTER_NS) * _QUARTER_NS
    return tuple(LogLine(line.at_ns - zone_ns, line.file, line.function, line.message) for line in lines)


def _parse_lines(text: str) -> Iterator[LogLine]:
    for match in map(_LINE.match, text.splitlines()):
        if match is not None:
            second = datetime.fromisoformat(match["second"]).replace(tzinfo=UTC)
            at_ns = int(second.timestamp()) * 10**9 + int(match["fraction"].ljust(9, "0"))
            yield LogLine(at_ns, match["file"], match["function"], match["message"])
