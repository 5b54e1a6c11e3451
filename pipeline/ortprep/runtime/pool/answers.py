"""From what a worker answered to arrays: all of it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortprep.errors import PoolError
from ortprep.runtime.pool.futures import Answer
from ortprep.runtime.pool.memory import BlockRef
from ortprep.runtime.pool.messages import IN_BLOCK, IN_PACKET, Head, PlaceReader, TensorPlace
from ortprep.runtime.tensors.signatures import Signature


@dataclass(slots=True)
class WorkerReply:
    """A worker's answer: arrays where they travelled in its packet, else where they lie in its block.

    Attributes:
        outputs: Name, type and place of those in the block, in the model's order.
        answer: The outputs, if they were in the packet.
    """

    head: Head
    outputs: Sequence[tuple[str, np.dtype[Any], TensorPlace]] = ()
    answer: Answer | None = None

    def view(self, block: BlockRef) -> Answer:
        """Returns the outputs, which keep the block in use."""
        return {name: block.view(place.offset, dtype, place.shape) for name, dtype, place in self.outputs}


class ReplyReader:
    """Reads the answers of a model."""

    def __init__(self, signature: Signature) -> None:
        self._outputs = tuple(signature.outputs.items())
        itemsizes = [dtype.itemsize for dtype in signature.outputs.values()]
        self._places = PlaceReader(itemsizes, f"answer of {signature.model}")

    def read(self, head: Head, packet: memoryview) -> WorkerReply:
        """Reads a packet, which may be used again then.

        Raises:
            PoolError: It is not an answer of this model.
            ValueError: A shape is none that an array can have.
        """
        places = self._places.read(packet, head)
        base = IN_BLOCK if head.block_bytes else IN_PACKET
        outputs, answer = [], {}
        for (name, dtype), place in zip(self._outputs, places, strict=True):
            if place.base != base:
                raise PoolError("answer lies outside of its memory")
            if head.block_bytes:
                outputs.append((name, dtype, place))
            else:
                answer[name] = np.ndarray(place.shape, dtype, packet, place.offset).copy()
        return WorkerReply(head, outputs, None if head.block_bytes else answer)
