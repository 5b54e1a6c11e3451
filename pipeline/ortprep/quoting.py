"""Text from outside in what people read: nothing in it steers a terminal, nothing in it steers a shell.

Names, paths, references and messages come from models, bundles, registries and clients.
"""

from __future__ import annotations

TYPE_CHECKING = False  # this module is part of the quickest start
if TYPE_CHECKING:
    import logging

_NOT_SHOWN = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, *, lines: bool = True) -> str:
    """Returns text without what a terminal takes for orders: control characters, bidirectional overrides.

    Everything that reaches a terminal passes through here. With `lines=False` it becomes a single line.
    """
    joined = text if lines else " ".join(text.split("\n"))
    return "".join(
        character if character.isprintable() or character in "\n\t" else _NOT_SHOWN for character in joined
    )


def quoted(*words: object) -> str:
    """Returns words as a shell reads them back, in quotes where they need any: `rm -r 'my folder'`."""
    import shlex

    return shlex.join(map(str, words))


def terminal_handler(line: str, *, lines: bool = True) -> logging.Handler:
    """Returns a handler that writes log records to stderr, printable.

    Args:
        line: Format of a record, as `logging.Formatter` takes it.
        lines: Whether a message may have several lines; else no message can look like two.
    """
    import logging

    class PrintableFormatter(logging.Formatter):
        def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
            return printable(super().formatMessage(record), lines=lines)

        def format(self, record: logging.LogRecord) -> str:
            return printable(super().format(record))

    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(line))
    return handler
