"""Problems of a spec, and the error that lists all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ortprep.errors import SpecError

Place = tuple[str | int, ...]
"""Position of a value in a file: keys and list indices from the top."""

MAX_REPORTED = 200
"""Maximum number of problems in one error."""

SHOWN_CHARACTERS = 60
"""Maximum length of a user's text in a message."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, order=True)
class Problem:
    """One problem.

    Attributes:
        file: Path of the file; empty for a spec written in Python.
        line: Line, from 1; None where no line can be named.
        place: Position in the file's data; empty for the file as a whole.
    """

    file: str
    line: int | None
    place: Place
    text: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (where, dotted(self.place), self.text) if part)


def dotted(place: Place) -> str:
    """Returns a place as people write it: `inputs.data_0.shapes[0][2]`, odd keys in quotes."""
    text = ""
    for step in place:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            key = step if len(step) <= SHOWN_CHARACTERS else step[:SHOWN_CHARACTERS] + "…"
            text += ("." if text else "") + (key if _PLAIN_KEY.fullmatch(key) else repr(key))
    return text


def build_error(problems: Iterable[Problem], *, hint: str | None = None) -> SpecError:
    """Returns the error that lists `problems`, each once, in the order of files and lines."""
    unique = sorted(set(problems), key=lambda p: (p.file, p.line or 0, dotted(p.place), p.text))
    files = list(dict.fromkeys(problem.file for problem in unique))
    count = "1 problem" if len(unique) == 1 else f"{len(unique)} problems"
    one = f"bad spec: {files[0]}" if files[0] else "bad spec"
    what = one if len(files) == 1 else f"bad specs: {len(files)} files"
    lines = "".join(f"\n  {problem}" for problem in unique[:MAX_REPORTED])
    if len(unique) > MAX_REPORTED:
        lines += f"\n  … and {len(unique) - MAX_REPORTED} more"
    return SpecError(
        f"{what} ({count}){lines}", hint=hint or "ortprep schema   # every key and what it takes"
    )
