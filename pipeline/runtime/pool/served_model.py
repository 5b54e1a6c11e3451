"""A model in a worker: from tensors in shared memory to answers in shared memory.

Inputs are read where they lie. Outputs are written where they are wanted as soon as their shapes are known
from an earlier run with inputs of the same shapes; the first time, and where shapes depend on values, they
are copied.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.bundle.codec import encode
from pipeline.errors import LoadError, PoolError, RunError
from pipeline.runtime.background_import import BackgroundImport
from pipeline.runtime.binding import BoundRun, run_once
from pipeline.runtime.deadline import Deadline
from pipeline.runtime.element_types import Array, element_type_of
from pipeline.runtime.golden import check_answers
from pipeline.runtime.opening import OpenedBundle, Wishes, open_bundle
from pipeline.runtime.pool.requests import read_signature
from pipeline.runtime.pool.segments import AttachedSegments, view_tensor
from pipeline.runtime.pool.tensor_headers import HERE, HeaderReader, TensorHeader, encode_headers, lay_out
from pipeline.runtime.pool.wire import NOWHERE, Frame, Kind, Span, encode_frame
from pipeline.runtime.pool.workplaces import limit_threads
from pipeline.runtime.selection import needs_gpu
from pipeline.runtime.session import onnxruntime_errors
from pipeline.runtime.tensors import run_session

if TYPE_CHECKING:
    from pipeline.runtime.session import SessionPlan

_LEAST_BOUND_BYTES = 64 * 1024
_REMEMBERED = 256

Shapes = tuple[tuple[int, ...], ...]
Outputs = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
Write = Callable[[bytes], None]
WaitForMemory = Callable[[int], Span | None]


def open_model(model: Mapping[str, Any], job: Mapping[str, Any]) -> ServedModel:
    """Opens a bundle as the worker's job says, and runs its golden sample.

    Args:
        model: `name`, `bundle`, `target`, and `config`, the loader config as the pool read it.
        job: `device`, `device_id`, `threads`, `may_spin`, `digests`.

    Raises:
        PipelineError: As `pipeline.runtime.load` does; or the bundle is another than the pool's.
    """

    def adapt(plan: SessionPlan) -> SessionPlan:
        return limit_threads(plan, job["threads"], may_spin=job["may_spin"])

    wishes = Wishes(
        target=model["target"],
        device_id=job["device_id"],
        digests=job["digests"],
        check="golden",
        deadline=Deadline(None, bundle=Path(model["bundle"])),
        adapt=adapt,
    )
    opened = open_bundle(Path(model["bundle"]), wishes, BackgroundImport())
    if encode(opened.config) != model["config"]:
        raise LoadError(
            f"bundle was replaced by another build: {model['bundle']}\n"
            f"  expected the one that the pool began with, whose answers it would mix with this one's",
            hint="make a new pool",
        )
    if model["target"] is None and needs_gpu(opened.variant.requirements) != (job["device_id"] is not None):
        raise LoadError(
            f"{model['name']} has no variant that runs on {job['device']} here: {model['bundle']}\n"
            f"  got variant {opened.variant.name!r}; passed over: "
            f"{' | '.join(map(str, opened.passed_over)) or 'none'}",
            hint="SessionPool(…, devices='cpu'), or ortprep check " + model["bundle"],
        )
    return ServedModel(model["name"], opened)


class ServedModel:
    """A session, and what is known of its answers.

    Args:
        name: Of the model.
        opened: What it was opened as.
    """

    def __init__(self, name: str, opened: OpenedBundle) -> None:
        self.name = name
        self._opened = opened
        self._session = opened.session
        signature = read_signature(name, opened.config)
        self._inputs, self._outputs = tuple(signature.inputs), list(signature.outputs)
        kinds = [element_type_of(dtype) for dtype in signature.inputs.values()]
        output_types = [value.type for value in opened.session.get_outputs()]
        self._is_native = not any(kinds) and all(map(_is_native, output_types))
        self._reader = HeaderReader()
        self._layouts: OrderedDict[Shapes, AnswerLayout | None] = OrderedDict()
        self._answers: dict[Outputs, AnswerLayout] = {}
        self._bound: tuple[Shapes, BoundRun | None] | None = None
        self._errors = onnxruntime_errors()

    @property
    def variant(self) -> str:
        """Name of the variant that was taken."""
        return self._opened.variant.name

    def check(self) -> None:
        """Runs the golden sample.

        Raises:
            LoadError: It is not answered as recorded.
            BundleError: It cannot be read.
        """
        opened = self._opened
        check_answers(self._session, opened.config, opened.chosen.root, variant=opened.variant)

    def run(
        self, frame: Frame, segments: AttachedSegments, write: Write, wait_for_memory: WaitForMemory
    ) -> tuple[Span, int, int]:
        """Answers a request.

        Returns:
            Where the answer is, how many bytes were copied for it, and the nanoseconds of the run.

        Raises:
            RunError: ONNX Runtime refused the request.
            PoolError: The request is unreadable, or there is no memory for the answer.
        """
        block = segments.bytes_of(frame.first)
        headers = self._reader.read(block)
        if len(headers) != len(self._inputs):
            raise PoolError(f"unreadable request\n  expected {len(self._inputs)} inputs, got {len(headers)}")
        feeds = {self._inputs[header.position]: _read(header, block, segments) for header in headers}
        shapes = tuple(header.shape for header in headers)
        started = time.perf_counter_ns()
        known = self._layouts.get(shapes)
        in_place = known is not None and known.size <= frame.second.size
        try:
            if known is not None and in_place:
                answer = self._run_in_place(feeds, known, frame.second, segments)
                if answer is not None:
                    return answer, 0, time.perf_counter_ns() - started
            outputs = self._run(feeds, shapes)
        except self._errors as error:
            raise RunError(
                f"ONNX Runtime cannot run {self.name}\n  {type(error).__name__}: {error}"
            ) from None
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

    def _run(self, feeds: dict[str, Array], shapes: Shapes) -> list[Array]:
        if self._opened.variant.io_binding:
            answers = self._run_bound(feeds, shapes)
        elif self._is_native:
            return list(self._session.run(self._outputs, feeds))
        else:
            answers = run_session(self._session, feeds)
        return [answers[name] for name in self._outputs]

    def _run_bound(self, feeds: dict[str, Array], shapes: Shapes) -> dict[str, Array]:
        """Runs the first shapes that come in place, where a CUDA graph may be recorded; others unrecorded."""
        if self._bound is None:
            answers = run_once(self._session, feeds, io_binding=True)  # they can be run at all
            # Copies, since on the CPU a bound value is the array itself, whose memory is the pool's.
            copies = {name: np.array(array) for name, array in feeds.items()}
            self._bound = shapes, BoundRun(self._session, copies)
            return answers
        bound_shapes, run = self._bound
        if bound_shapes != shapes or run is None:
            return run_once(self._session, feeds, io_binding=True)
        run.update(feeds)
        try:
            run()
        except self._errors:
            # Outputs are bound to the memory of the first run; where their shapes depend on values, no more.
            self._bound = bound_shapes, None
            return run_once(self._session, feeds, io_binding=True)
        return run.outputs()

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
        is_bindable = self._is_native and not self._opened.variant.io_binding and layout.is_bindable
        self._layouts[shapes] = layout if known is layout and is_bindable and not was_refused else None
        if len(self._layouts) > _REMEMBERED:
            self._layouts.popitem(last=False)

    def _run_in_place(
        self, feeds: dict[str, Array], known: AnswerLayout, span: Span, segments: AttachedSegments
    ) -> Span | None:
        """Runs with the outputs where they are wanted; None if they turn out to be of other shapes."""
        binding = self._session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        block = segments.bytes_of(span)
        views = [_read(header, block, segments) for header in known.headers]
        for name, view in zip(self._outputs, views, strict=True):
            binding.bind_output(name, "cpu", 0, view.dtype, list(view.shape), view.ctypes.data)
        try:
            self._session.run_with_iobinding(binding)
        except self._errors:
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
                _read(header, block, segments)[...] = array
        return self.write_headers(span, block)

    def write_headers(self, span: Span, block: NDArray[np.uint8]) -> Span:
        """Writes headers, and returns where all of the answer is."""
        block[: len(self._text)] = self._text
        return Span(span.segment, span.offset, self.size)


def _is_native(type_name: str) -> bool:
    name = type_name.removeprefix("tensor(").removesuffix(")")
    return name in _NATIVE_TYPES


_NATIVE_TYPES = frozenset(
    {"float", "double", "float16", "bool"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def _read(header: TensorHeader, block: NDArray[np.uint8], segments: AttachedSegments) -> Array:
    _, dtype, shape, segment, offset, size = header
    if size == 0:
        return np.empty(shape, dtype)
    if segment != HERE:
        return view_tensor(segments.bytes_of(Span(segment, offset, size)), dtype, shape)
    if offset + size > len(block):
        raise PoolError(f"tensor leaves its block\n  expected at most {len(block)} bytes, got {header}")
    return view_tensor(block[offset : offset + size], dtype, shape)
