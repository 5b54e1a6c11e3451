"""Runs with inputs and outputs bound to the session's device, so that nothing is copied between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ortprep.errors import LoadError
from ortprep.runtime.loading.session import CUDA, onnxruntime_errors
from ortprep.runtime.tensors.arrays import run_session

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.tensors.element_types import Array

T = TypeVar("T")

_Layout = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shapes and types of inputs by name."""

_GRAPH_ID, _UNRECORDED = "gpu_graph_id", "-1"
"""Run config entry of the CUDA provider: with this value a run is neither recorded nor replayed
(https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html)."""

_REBIND_AFTER = 3
"""Batches of the same shapes in a row after which it pays to bind to them."""


def run_once(
    session: onnxruntime.InferenceSession, feeds: Mapping[str, Array], *, io_binding: bool
) -> dict[str, Array]:
    """Runs a session once and returns its outputs by name, as arrays on the host.

    Nothing is recorded, so that a later binding has the session's CUDA graph for their own addresses.
    """
    if not io_binding:
        return run_session(session, feeds)
    run = BoundRun(session, feeds)
    run()
    return run.outputs()


class BoundRun:
    """A run that can be repeated: inputs, once copied, and outputs stay where they are on the device.

    A recorded CUDA graph is replayed on the addresses it was recorded on, whatever is bound by then. So the
    first run is not recorded, outputs are bound to the memory that it gave them, and later runs find
    everything in its place. A session has one recorded graph, so it serves one such run: plans with CUDA
    graphs are for one set of shapes.
    """

    def __init__(self, session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> None:
        import onnxruntime

        on_gpu = CUDA in session.get_providers()
        options = session.get_provider_options().get(CUDA, {})
        self._session, self._binding = session, session.io_binding()
        self._names = [output.name for output in session.get_outputs()]
        self._is_bound = False
        self._unrecorded = onnxruntime.RunOptions()
        self._unrecorded.add_run_config_entry(_GRAPH_ID, _UNRECORDED)
        device, ordinal = ("cuda", int(options.get("device_id", "0"))) if on_gpu else ("cpu", 0)
        self._inputs = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(array, device, ordinal)
            for name, array in feeds.items()
        }
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name in self._names:
            self._binding.bind_output(name, device, ordinal)

    def __call__(self) -> None:
        """Runs once more."""
        if self._is_bound:
            self._session.run_with_iobinding(self._binding)
            return
        self._session.run_with_iobinding(self._binding, self._unrecorded)
        for name, value in zip(self._names, self._binding.get_outputs(), strict=True):
            self._binding.bind_ortvalue_output(name, value)
        self._is_bound = True

    def update(self, feeds: Mapping[str, Array]) -> None:
        """Puts other values where the inputs are, for the runs to come.

        On the CPU that is into the arrays this was made with, which ONNX Runtime reads where they are.
        """
        for name, array in feeds.items():
            self._inputs[name].update_inplace(np.ascontiguousarray(array))

    def outputs(self) -> dict[str, Array]:
        """Returns what the last run answered by output name, copied to the host."""
        return dict(zip(self._names, self._binding.copy_outputs_to_cpu(), strict=True))


class BoundRuns:
    """Runs of a session that needs inputs and outputs bound, on batches of any shapes, one at a time.

    It is bound to the first shapes, and to others once they come several times in a row; batches of any other
    shapes run unrecorded, as `run_once` does. A session that records a CUDA graph stays with the first: it
    would replay the graph on their addresses.
    """

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self._errors = onnxruntime_errors()
        self._in_place: BoundRun | None = None
        self._last: _Layout | None = None
        self._in_a_row = 0
        cuda = session.get_provider_options().get(CUDA, {})
        self._is_recorded = cuda.get("enable_cuda_graph", "0").lower() in ("1", "true")
        self._layout: _Layout | None = None

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs on a batch, and returns its outputs on the host by name."""
        # With the types, since ONNX Runtime copies as many bytes as are bound, of whatever array it is given.
        layout = {name: (array.shape, array.dtype) for name, array in feeds.items()}
        self._in_a_row = self._in_a_row + 1 if layout == self._last else 1
        self._last = layout
        is_frequent = self._in_a_row >= _REBIND_AFTER and not self._is_recorded
        if self._layout is None or (layout != self._layout and is_frequent):
            answers = run_once(self._session, feeds, io_binding=True)  # they can be run at all
            # Copies, since on the CPU a bound value is the array itself, which is the caller's.
            copies = {name: np.array(array) for name, array in feeds.items()}
            self._layout, self._in_place = layout, BoundRun(self._session, copies)
            return answers
        if self._in_place is None or self._layout != layout:
            return run_once(self._session, feeds, io_binding=True)
        self._in_place.update(feeds)
        try:
            self._in_place()
        except self._errors:
            # Outputs are bound to the memory of the first run; where their shapes depend on values, no more.
            self._in_place = None
            return run_once(self._session, feeds, io_binding=True)
        return self._in_place.outputs()


def run_first(run: Callable[[], T], feeds: Mapping[str, Array], model: str) -> T:
    """Returns what the first run of a session returns; raises `LoadError` if ONNX Runtime refuses it."""
    try:
        return run()
    except onnxruntime_errors() as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
        raise LoadError(
            f"cannot run {model}\n  with {shapes}: {type(error).__name__}: {error}",
            hint="give shapes that it takes: in its spec, or the doctor --shape NAME=1,3,224 or a bundle",
        ) from error
