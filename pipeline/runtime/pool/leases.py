"""Arrays on blocks of the arena: a block goes back when the last array on it is gone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.runtime.pool.arena import Block, Notes
from pipeline.runtime.pool.segments import bytes_at


class Lease:
    """Somebody's right to a block; ends when it is collected.

    The garbage collector may come at any moment, even to a thread that holds the pool's lock, so all it does
    is leave a note; whoever needs memory next takes it.

    Args:
        block: The block, whose segment stays mapped as long as this lives.
        notes: Where the note goes (`Arena.notes`).
    """

    __slots__ = ("_block", "_notes")

    def __init__(self, block: Block, notes: Notes) -> None:
        self._block, self._notes = block, notes

    def __del__(self) -> None:
        self._notes.leave(self._block)

    def bytes(self, offset: int = 0, size: int | None = None) -> NDArray[np.uint8]:
        """Returns an array over the block or a part of it, which keeps the lease, as all cut from it do."""
        length = self._block.span.size - offset if size is None else size
        return bytes_at(self._block.address + offset, length, self)
