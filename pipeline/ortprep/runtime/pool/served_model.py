"""A model in a worker: from the tensors of a request to an answer, with a session for every bucket.

Inputs are read where they lie. Outputs are written to the slot as soon as their shapes are known from an
earlier run with inputs of the same shapes; the first time, and where shapes depend on values, they are
copied. Where they do not fit, the worker keeps them until the pool has made the slot larger.
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
from ortprep.runtime.pool.memory import MemoryFile, pack_inline
from ortprep.runtime.pool.messages import (
    IN_PACKET,
    IN_SLOT,
    Head,
    Layout,
    MessageKind,
    PlaceReader,
    TensorPlace,
    encode_head,
    encode_tensors,
    fit_into,
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

    def find_unfit(self) -> str:
        """Returns why its sessions cannot be inherited by a fork; empty if they can be."""
        providers = {name for one in self._sessions.all for name in one.runner.session.get_providers()}
        others = sorted(providers - {"CPUExecutionProvider"})
        return f"{self.name} uses {', '.join(others)}" if others else ""

    def check(self) -> None:
        """Runs the golden sample of every variant; raises `LoadError` if one is not answered as recorded."""
        for session in self._sessions.all:
            session.runner.check()

    def run(self, head: Head, packet: memoryview, memory: SlotMemory) -> bytes:
        """Runs on a request and returns the packet that answers it.

        Raises:
            RunError: ONNX Runtime refused the request.
            PoolError: The request is unreadable, or an output has the wrong type.
        """
        places = self._reader.read(packet, head, head.size)
        feeds = {
            name: memory.read(place, dtype, packet, head)
            for (name, dtype), place in zip(self._inputs, places, strict=True)
        }
        shapes = tuple([place.shape for place in places])
        return self._sessions.find(shapes).run(feeds, shapes, head, memory)


class ServedSession:
    """A session, and what is known of its answers."""

    def __init__(self, signature: Signature, opened: OpenedBundle) -> None:
        self.runner = SessionRunner(signature, opened)
        self._name = signature.model
        self._outputs = tuple(signature.outputs.items())
        self._layouts: OrderedDict[Shapes, Layout | None] = OrderedDict()

    def run(self, feeds: Mapping[str, Array], shapes: Shapes, head: Head, memory: SlotMemory) -> bytes:
        """Runs on inputs whose shapes are in the model's order; raises as `ServedModel.run`."""
        started = time.perf_counter_ns()
        known = self._layouts.get(shapes)
        try:
            layout = None if known is None else fit_into(known, head.figure, head.size)
            if layout is not None and self._run_in_place(feeds, layout, head, memory):
                elapsed_ns = time.perf_counter_ns() - started
                return encode_tensors(MessageKind.DONE, head.number, layout, figure=elapsed_ns)
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
        return memory.answer(head, layout, outputs, elapsed_ns)

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
            and layout.slot_bytes >= _MIN_BOUND_BYTES
            and all(math.prod(place.shape) for place in layout.places)
        )
        self._layouts[shapes] = layout if previous == layout and is_bindable and not was_refused else None
        if len(self._layouts) > _MAX_CACHED:
            self._layouts.popitem(last=False)

    def _run_in_place(
        self, feeds: Mapping[str, Array], layout: Layout, head: Head, memory: SlotMemory
    ) -> bool:
        """Runs with the outputs in the slot; returns False if they turn out to be of other shapes."""
        session = self.runner.session
        binding = self.runner.bind()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        views = [
            memory.file.view(head.begin + place.offset, dtype, place.shape)
            for (_, dtype), place in zip(self._outputs, layout.places, strict=True)
        ]
        try:
            for (name, dtype), view in zip(self._outputs, views, strict=True):
                binding.bind_output(name, "cpu", 0, dtype, list(view.shape), view.ctypes.data)
            session.run_with_iobinding(binding)
        except self.runner.errors:
            return False  # the run that follows says whether it was the shapes or the inputs
        # An output that is an input as well, or an initializer, is handed back and not written.
        outputs = zip(binding.get_outputs(), views, strict=True)
        return all(value.data_ptr() == view.ctypes.data for value, view in outputs)


class SlotMemory:
    """The slots' memory as a worker sees it.

    Args:
        descriptor: Descriptor of the memory file.
        size: Its size, in bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.file = MemoryFile(descriptor, size)
        self._kept: dict[int, tuple[Head, Layout, Sequence[Array], int]] = {}

    def read(self, place: TensorPlace, dtype: np.dtype[Any], packet: memoryview, head: Head) -> Array:
        """Returns a tensor of a request, where it lies."""
        base, offset, shape = place
        if base == IN_PACKET:
            return np.ndarray(shape, dtype, packet, offset)
        return self.file.view(offset + head.begin if base == IN_SLOT else offset, dtype, shape)

    def answer(self, head: Head, layout: Layout, outputs: Sequence[Array], elapsed_ns: int) -> bytes:
        """Returns the packet that answers a request, with its outputs or with the memory that they need."""
        if not layout.slot_bytes:
            begin = encode_tensors(MessageKind.DONE, head.number, layout, figure=elapsed_ns)
            return pack_inline(begin, layout, outputs)
        moved = fit_into(layout, head.figure, head.size)
        if moved is None:
            # Copies, since an output that is an input lies in a buffer that the next packet overwrites.
            self._kept[head.number] = head, layout, [output.copy() for output in outputs], elapsed_ns
            return encode_head(MessageKind.NEED, head.number, figure=layout.slot_bytes)
        self.file.write(head.begin, moved, outputs)
        return encode_tensors(MessageKind.DONE, head.number, moved, figure=elapsed_ns)

    def grown(self, head: Head) -> bytes | None:
        """Returns the answer whose slot has grown; None if the pool has no memory for it, which drops it."""
        request, layout, outputs, elapsed_ns = self._kept.pop(head.number)
        if not head.size:
            return None
        return self.answer(request._replace(begin=head.begin, size=head.size), layout, outputs, elapsed_ns)
