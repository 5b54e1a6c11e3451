"""A model in a worker: from the tensors of a request to an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ortprep.bundle.codec import encode
from ortprep.errors import LoadError, NoRoomError, PoolError
from ortprep.runtime.ipc import MemoryFile, copy_arrays
from ortprep.runtime.loading.opened_bundle import OpenedBundle
from ortprep.runtime.opened_model import OpenedModel, open_variants
from ortprep.runtime.pool.messages import Head, LayoutReader, encode_answer, lay_out
from ortprep.runtime.tensors.element_types import Array

if TYPE_CHECKING:
    from ortprep.runtime.pool.worker_process import ModelJob, WorkerJob


def open_served(model: ModelJob, job: WorkerJob) -> ServedModel:
    """Opens a bundle as the worker's job says, and runs its golden samples.

    Raises:
        PipelineError: As `ortprep.runtime.load` does; or the bundle is another than the pool's.
    """
    opened, buckets = open_variants(model.bundle, job.load, device_id=job.device_id)
    if encode(opened.config) != encode(model.config):
        raise LoadError(
            f"bundle was replaced by another build: {model.bundle}\n"
            f"  expected the build that the pool started with, since answers of two builds must not mix",
            hint="make a new pool",
        )
    return ServedModel(model.name, opened, buckets)


class ServedModel(OpenedModel):
    """A model's sessions, which answer requests that lie in packets and slots."""

    def __init__(self, name: str, opened: OpenedBundle, buckets: Sequence[OpenedBundle]) -> None:
        super().__init__(name, opened, buckets)
        self._inputs = tuple(self.signature.inputs.values())
        self._outputs = tuple(self.signature.outputs.items())
        self._itemsizes = tuple([dtype.itemsize for _, dtype in self._outputs])
        self._reader = LayoutReader([dtype.itemsize for dtype in self._inputs], f"request to {name}")

    def read(self, head: Head, packet: memoryview, file: MemoryFile) -> tuple[list[Array], int]:
        """Returns the inputs of a request, where they lie, and the bytes that they take in its slot.

        Raises:
            PoolError: The request is unreadable.
        """
        layout = self._reader.read(packet, head, head.size)
        buffer, begin = (file.memory, head.begin) if layout.slot_bytes else (packet, 0)
        places = zip(self._inputs, layout.shapes, layout.offsets, strict=True)
        arrays = [np.ndarray(shape, dtype, buffer, begin + offset) for dtype, shape, offset in places]
        return arrays, layout.slot_bytes

    def answer(self, head: Head, packet: memoryview, file: MemoryFile) -> bytes:
        """Runs on a request and returns the packet that answers it; large outputs lie behind the inputs.

        Raises:
            RunError: ONNX Runtime refused the request.
            NoRoomError: The slot has no room for the outputs.
            PoolError: The request is unreadable, or an output has the wrong type.
        """
        arrays, begin = self.read(head, packet, file)
        started_ns = time.perf_counter_ns()
        outputs = self.run(arrays)
        elapsed_ns = time.perf_counter_ns() - started_ns
        for (name, dtype), output in zip(self._outputs, outputs, strict=True):
            if output.dtype != dtype:
                kinds = f"expected {dtype}, got {output.dtype}"
                raise PoolError(f"output {name!r} of {self.name} has the wrong type\n  {kinds}")
        layout = lay_out(tuple([output.shape for output in outputs]), self._itemsizes)
        if begin + layout.slot_bytes > head.size:
            raise NoRoomError(
                f"answer of {self.name} does not fit the pool's shared memory\n"
                f"  expected at most {head.size} bytes with the request, got {begin + layout.slot_bytes}",
                hint=f"PoolConfig(max_shared_bytes={2 * (begin + layout.slot_bytes):d})",
            )
        if layout.slot_bytes:
            copy_arrays(outputs, layout.offsets, file.memory, head.begin + begin)
        return encode_answer(head.number, layout, outputs, service_ns=elapsed_ns)

    def find_unfit(self) -> str:
        """Returns why its sessions cannot be inherited by a fork; empty if they can be."""
        providers = {name for one in self._runners.values() for name in one.session.get_providers()}
        others = sorted(providers - {"CPUExecutionProvider"})
        return f"{self.name} uses {', '.join(others)}" if others else ""
