"""The recorded moves of an alias, and what it named before. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ortprep.bundle.codec import canonical_json, decode, encode
from ortprep.bundle.digest import is_digest
from ortprep.errors import IntegrityError
from ortprep.registry.documents import is_alias_name, parse_object

MAX_SEQUENCE = 2**31
MAX_HISTORY = 50
"""Largest number of earlier versions in a move."""


@dataclass(frozen=True)
class Move:
    """An alias came to name a version.

    Attributes:
        sequence: Number of the move, from 1 on.
        action: `promote` or `rollback`.
        before: Digests of the versions that `rollback` can go back to, the next one last.
        reason: Why, in the user's words; always given when forced.
        forced: What the gate objected to, when it was overruled.
    """

    alias: str
    version: str
    sequence: int
    action: str
    at: str
    before: tuple[str, ...] = ()
    reason: str = ""
    forced: tuple[str, ...] = ()
    by: str = ""


def encode_move(move: Move) -> bytes:
    """Returns the document of a move."""
    return canonical_json(encode(move))


def parse_move(data: bytes) -> Move:
    """Parses the untrusted document of a move.

    Raises:
        IntegrityError: It has a value that `promote` and `rollback` never write.
        BundleError: It is not a move.
    """
    move = decode(Move, parse_object(data), where="a move")
    if move.action not in ("promote", "rollback") or not 0 < move.sequence < MAX_SEQUENCE:
        raise IntegrityError("bad alias move\n  expected an action, and a number up to 2**31")
    is_bounded = len(move.before) <= MAX_HISTORY and len(move.at) <= 64
    if (
        not is_bounded
        or not is_alias_name(move.alias)
        or not all(map(is_digest, (move.version, *move.before)))
    ):
        raise IntegrityError("bad alias move\n  expected a name, a time and digests of versions")
    return move


def find_earlier_versions(moves: Sequence[Move], current: str, versions: Collection[str]) -> tuple[str, ...]:
    """Returns the versions that an alias named before this one and that are still there, oldest first.

    If another tool moved it since, the last recorded version is one of them. `moves` are all moves of the
    alias, in order; `current` is "" if it names nothing.
    """
    if not moves:
        return ()
    last = moves[-1]
    named = last.before if last.version == current else (*last.before, last.version)
    return tuple(digest for digest in named if digest in versions)[-MAX_HISTORY:]
