"""A model in a worker: from the tensors of a request to an answer, with a session for every bucket.

Inputs are read where they lie. Outputs are written where they are wanted as soon as their shapes are known
from an earlier run with inputs of the same shapes; the first time, and where shapes depend on values, they
are copied.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ortprep.bundle.codec import encode
from ortprep.errors import LoadError, PoolError
from ortprep.runtime.loading.opened_bundle import OpenedBundle
from ortprep.runtime.pool.memory import Arena, MemoryFile, pack_inline
from ortprep.runtime.pool.messages import (
    IN_BLOCK,
    IN_PACKET,
    Head,
    Layout,
    MessageKind,
    PlaceReader,
    Span,
    TensorPlace,
    encode_tensors,
    lay_out,
)
from ortprep.runtime.session.opened_model import open_variants
from ortprep.runtime.session.session_runner import SessionRunner, ShapeDispatcher, Shapes
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature, read_signature

if TYPE_CHECKING:
    from ortprep.runtime.pool.process import ModelJob, WorkerJob

_MIN_BOUND_BYTES = 64 * 1024
_MAX_CACHED = 256


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


class ServedModel:
    """A model's sessions: one for all shapes and those of its buckets; a request takes what fits."""

    def __init__(self, name: str, opened: OpenedBundle, buckets: Sequence[OpenedBundle]) -> None:
        self.name = name
        signature = read_signature(name, opened.config)
        self._inputs = tuple(signature.inputs.items())
        self._sessions = ShapeDispatcher(opened, buckets, partial(ServedSession, signature))
        self.variant, self.buckets = self._sessions.variant, self._sessions.buckets
        itemsizes = [dtype.itemsize for dtype in signature.inputs.values()]
        self._reader = PlaceReader(itemsizes, f"request to {name}")

    def check(self) -> None:
        """Runs the golden sample of every variant; raises `LoadError` if one is not answered as recorded."""
        for session in self._sessions.all:
            session.runner.check()

    def run(self, head: Head, packet: memoryview, memory: AnswerMemory) -> bytes:
        """Runs on a request and returns the packet that answers it.

        Raises:
            RunError: ONNX Runtime refused the request.
            PoolError: The request is unreadable, or there is no memory for the answer.
        """
        places = self._reader.read(packet, head)
        feeds = {
            name: memory.read(place, dtype, packet, head)
            for (name, dtype), place in zip(self._inputs, places, strict=True)
        }
        shapes = tuple([place.shape for place in places])
        return self._sessions.find(shapes).run(feeds, shapes, head.number, memory)


class ServedSession:
    """A session, and what is known of its answers."""

    def __init__(self, signature: Signature, opened: OpenedBundle) -> None:
        self.runner = SessionRunner(signature, opened)
        self._name = signature.model
        self._outputs = tuple(signature.outputs.items())
        self._layouts: OrderedDict[Shapes, Layout | None] = OrderedDict()

    def run(self, feeds: Mapping[str, Array], shapes: Shapes, number: int, memory: AnswerMemory) -> bytes:
        """Runs on inputs whose shapes are in the model's order; raises as `ServedModel.run`."""
        feeds = self.runner.fit(feeds)
        started = time.perf_counter_ns()
        layout = self._layouts.get(shapes)
        try:
            span = None if layout is None else self._run_in_place(feeds, layout, memory)
            if layout is not None and span is not None:
                return self._encode(number, layout, span, time.perf_counter_ns() - started, 0)
            outputs = self.runner.attempt(feeds)
        except self.runner.errors as error:  # also of binding, which copies to a GPU
            raise self.runner.refusal(error) from None
        elapsed_ns = time.perf_counter_ns() - started
        self._check_types(outputs)
        was_refused = layout is not None
        layout = lay_out(
            tuple([output.shape for output in outputs]), tuple([output.nbytes for output in outputs])
        )
        self._learn(shapes, layout, was_refused=was_refused)
        return self._copy(number, layout, outputs, elapsed_ns, memory)

    def _check_types(self, outputs: Sequence[Array]) -> None:
        for (name, dtype), output in zip(self._outputs, outputs, strict=True):
            if output.dtype != dtype:
                kinds = f"expected {dtype}, got {output.dtype}"
                raise PoolError(f"output {name!r} of {self._name} has the wrong type\n  {kinds}")

    def _learn(self, shapes: Shapes, layout: Layout, *, was_refused: bool) -> None:
        """Remembers what comes out for inputs of some shapes; None where that is no use or not always so."""
        previous = self._layouts.get(shapes, layout)
        if previous is None:
            return
        is_bindable = (
            self.runner.is_native
            and self.runner.bound is None
            and layout.block_bytes >= _MIN_BOUND_BYTES
            and all(math.prod(place.shape) for place in layout.places)
        )
        self._layouts[shapes] = layout if previous == layout and is_bindable and not was_refused else None
        if len(self._layouts) > _MAX_CACHED:
            self._layouts.popitem(last=False)

    def _run_in_place(self, feeds: Mapping[str, Array], layout: Layout, memory: AnswerMemory) -> Span | None:
        """Runs with the outputs where they are wanted; None if they turn out to be of other shapes."""
        session = self.runner.session
        binding = self.runner.bind()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        span = memory.allocate(layout.block_bytes)
        views = [
            memory.file.view(span.offset + place.offset, dtype, place.shape)
            for (_, dtype), place in zip(self._outputs, layout.places, strict=True)
        ]
        is_written = False
        try:
            for (name, dtype), view in zip(self._outputs, views, strict=True):
                binding.bind_output(name, "cpu", 0, dtype, list(view.shape), view.ctypes.data)
            session.run_with_iobinding(binding)
            # An output that is an input as well, or an initializer, is handed back and not written.
            outputs = zip(binding.get_outputs(), views, strict=True)
            is_written = all(value.data_ptr() == view.ctypes.data for value, view in outputs)
        except self.runner.errors:
            pass  # the run that follows says whether it was the shapes or the inputs
        finally:
            if not is_written:
                memory.release(span.offset)
        return span if is_written else None

    def _copy(
        self, number: int, layout: Layout, outputs: Sequence[Array], elapsed_ns: int, memory: AnswerMemory
    ) -> bytes:
        copied_bytes = sum(output.nbytes for output in outputs)
        if layout.block_bytes:
            span = memory.allocate(layout.block_bytes)
            memory.file.write(span, layout, outputs)
            return self._encode(number, layout, span, elapsed_ns, copied_bytes)
        return pack_inline(self._encode(number, layout, Span(), elapsed_ns, copied_bytes), layout, outputs)

    def _encode(self, number: int, layout: Layout, span: Span, elapsed_ns: int, copied_bytes: int) -> bytes:
        return encode_tensors(MessageKind.DONE, 0, number, layout, span, elapsed_ns, copied_bytes)


class AnswerMemory:
    """Shared memory as a worker sees it: it allocates the blocks of its answers itself."""

    def __init__(self, job: WorkerJob) -> None:
        assert job.memory is not None
        self.file = MemoryFile(job.descriptors[3], job.memory.size)
        self._arena = Arena(self.file, job.memory.region, job.memory.max_bytes, job.memory.taken)
        self._status = self.file.bytes[job.memory.status :][:16].view(np.uint64)

    def begin(self, number: int) -> None:
        """Says which request this worker is at."""
        self._status[0] = number

    def read(self, place: TensorPlace, dtype: np.dtype[Any], packet: memoryview, head: Head) -> Array:
        """Returns a tensor of a request, where it lies."""
        base, offset, shape = place
        if base == IN_PACKET:
            return np.ndarray(shape, dtype, packet, offset)
        return self.file.view(offset + head.block if base == IN_BLOCK else offset, dtype, shape)

    def allocate(self, size: int) -> Span:
        """Returns a block for an answer; raises `NoRoomError` if answers in use take too much."""
        block = self._arena.allocate(size)
        self._status[1] = self._arena.held_bytes
        return block

    def release(self, *offsets: int) -> None:
        """Takes blocks back, by where they begin."""
        for offset in offsets:
            self._arena.release(offset)
        self._status[1] = self._arena.held_bytes

    def trim(self) -> None:
        """Gives the memory of blocks that are not in use back to the system."""
        self._arena.trim(0)
        self._status[1] = self._arena.held_bytes
