"""A session in a worker: from tensors in shared memory to answers in shared memory.

Inputs are read where they lie. Outputs are written where they are wanted as soon as their shapes are known
from an earlier run with inputs of the same shapes; the first time, and where shapes depend on values, they
are copied.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PoolError
from pipeline.runtime.binding import BoundRuns
from pipeline.runtime.element_types import Array
from pipeline.runtime.loading.bundle_loader import OpenedBundle
from pipeline.runtime.pool.requests import Signature
from pipeline.runtime.pool.segments import AttachedSegments, view_tensor
from pipeline.runtime.pool.session_runner import SessionRunner, Shapes
from pipeline.runtime.pool.tensor_headers import HERE, TensorHeader, encode_headers, lay_out
from pipeline.runtime.pool.wire import NOWHERE, Frame, Kind, Span, encode_frame

_LEAST_BOUND_BYTES = 64 * 1024
_REMEMBERED = 256

Outputs = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
Write = Callable[[bytes], None]
WaitForMemory = Callable[[int], Span | None]


class ServedSession:
    """A session, and what is known of its answers.

    Args:
        signature: Of the model.
        opened: What it was opened as.
    """

    def __init__(self, signature: Signature, opened: OpenedBundle) -> None:
        self.name = signature.model
        self._runner = SessionRunner(signature, opened, BoundRuns)
        self._inputs, self._outputs = tuple(signature.inputs), list(signature.outputs)
        self._layouts: OrderedDict[Shapes, AnswerLayout | None] = OrderedDict()
        self._answers: dict[Outputs, AnswerLayout] = {}

    def check(self) -> None:
        """Runs the golden sample.

        Raises:
            LoadError: It is not answered as recorded.
            BundleError: It cannot be read.
        """
        self._runner.check()

    def run(
        self,
        frame: Frame,
        headers: Sequence[TensorHeader],
        segments: AttachedSegments,
        write: Write,
        wait_for_memory: WaitForMemory,
    ) -> tuple[Span, int, int]:
        """Answers a request, as `ServedModel.run` does.

        Raises:
            RunError: ONNX Runtime refused the request.
            PoolError: The request is unreadable, or there is no memory for the answer.
        """
        block = segments.bytes_of(frame.first)
        read = {self._inputs[header.position]: read_tensor(header, block, segments) for header in headers}
        feeds = self._runner.fit(read)
        shapes = tuple(header.shape for header in headers)
        started = time.perf_counter_ns()
        known = self._layouts.get(shapes)
        in_place = known is not None and known.size <= frame.second.size
        try:
            if known is not None and in_place:
                answer = self._run_in_place(feeds, known, frame.second, segments)
                if answer is not None:
                    return answer, 0, time.perf_counter_ns() - started
            outputs = self._runner.attempt(feeds)
        except self._runner.errors as error:  # also of binding, which copies to a GPU
            raise self._runner.refusal(error) from None
        elapsed = time.perf_counter_ns() - started
        layout = self._lay_out(outputs)
        self._learn(shapes, layout, was_refused=in_place)
        span = frame.second
        if layout.size > span.size:
            need = Span(0, 0, layout.size)
            write(encode_frame(Frame(Kind.NEED, frame.model, frame.request, NOWHERE, need)))
            granted = wait_for_memory(frame.request)
            if granted is None:
                raise PoolError(
                    f"no shared memory for an answer of {self.name}\n  expected {layout.size} bytes free",
                    hint=f"SessionPool(…, max_shared_bytes={4 * layout.size})",
                )
            span = granted
        return layout.write(outputs, span, segments), sum(array.nbytes for array in outputs), elapsed

    def _lay_out(self, outputs: list[Array]) -> AnswerLayout:
        kinds = tuple((array.dtype, array.shape) for array in outputs)
        layout = self._answers.get(kinds)
        if layout is None:
            if len(self._answers) >= _REMEMBERED:
                self._answers.clear()
            layout = self._answers[kinds] = AnswerLayout(kinds)
        return layout

    def _learn(self, shapes: Shapes, layout: AnswerLayout, *, was_refused: bool) -> None:
        """Remembers what comes out for inputs of some shapes; None where that is no use or not always so."""
        known = self._layouts.get(shapes, layout)
        is_bindable = self._runner.is_native and self._runner.bound is None and layout.is_bindable
        self._layouts[shapes] = layout if known is layout and is_bindable and not was_refused else None
        if len(self._layouts) > _REMEMBERED:
            self._layouts.popitem(last=False)

    def _run_in_place(
        self, feeds: Mapping[str, Array], known: AnswerLayout, span: Span, segments: AttachedSegments
    ) -> Span | None:
        """Runs with the outputs where they are wanted; None if they turn out to be of other shapes."""
        session = self._runner.session
        binding = session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        block = segments.bytes_of(span)
        views = [read_tensor(header, block, segments) for header in known.headers]
        for name, view in zip(self._outputs, views, strict=True):
            binding.bind_output(name, "cpu", 0, view.dtype, list(view.shape), view.ctypes.data)
        try:
            session.run_with_iobinding(binding)
        except self._runner.errors:
            return None  # the run that follows says whether it was the shapes or the inputs
        # An output that is an input as well, or an initializer, is handed back and not written.
        given = zip(binding.get_outputs(), views, strict=True)
        if any(value.data_ptr() != view.ctypes.data for value, view in given):
            return None
        return known.write_headers(span, block)


class AnswerLayout:
    """Where outputs of some types and shapes go.

    Args:
        kinds: Types and shapes, in the model's order.
    """

    def __init__(self, kinds: Outputs) -> None:
        self.headers, self.size = lay_out(kinds)
        self._text = np.frombuffer(encode_headers(self.headers), np.uint8)

    @property
    def is_bindable(self) -> bool:
        """Whether it is worth while, and possible, to have ONNX Runtime write there."""
        return self.size >= _LEAST_BOUND_BYTES and all(header.size for header in self.headers)

    def write(self, outputs: list[Array], span: Span, segments: AttachedSegments) -> Span:
        """Writes outputs and headers, and returns where."""
        block = segments.bytes_of(span)
        for header, array in zip(self.headers, outputs, strict=True):
            if header.size:
                read_tensor(header, block, segments)[...] = array
        return self.write_headers(span, block)

    def write_headers(self, span: Span, block: NDArray[np.uint8]) -> Span:
        """Writes headers, and returns where all of the answer is."""
        block[: len(self._text)] = self._text
        return Span(span.segment, span.offset, self.size)


def read_tensor(header: TensorHeader, block: NDArray[np.uint8], segments: AttachedSegments) -> Array:
    """Returns a tensor of a request or an answer, where it lies.

    Raises:
        PoolError: It lies beyond its block.
    """
    _, dtype, shape, segment, offset, size = header
    if size == 0:
        return np.empty(shape, dtype)
    if segment != HERE:
        return view_tensor(segments.bytes_of(Span(segment, offset, size)), dtype, shape)
    if offset + size > len(block):
        raise PoolError(f"tensor leaves its block\n  expected at most {len(block)} bytes, got {header}")
    return view_tensor(block[offset : offset + size], dtype, shape)
