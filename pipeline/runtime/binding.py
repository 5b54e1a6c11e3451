"""Runs with inputs and outputs bound to the session's device, so that nothing is copied between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pipeline.runtime.loading.session import CUDA, onnxruntime_errors
from pipeline.runtime.tensors import run_session

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.runtime.element_types import Array

_GRAPH_ID, _UNRECORDED = "gpu_graph_id", "-1"
"""Run config entry of the CUDA provider: with this value a run is neither recorded nor replayed
(https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html)."""


def run_once(
    session: onnxruntime.InferenceSession, feeds: Mapping[str, Array], *, io_binding: bool
) -> dict[str, Array]:
    """Runs a session once and returns its outputs by name, as arrays on the host.

    Nothing is recorded, so that whoever binds later has the session's CUDA graph for their own addresses.

    Args:
        session: The session.
        feeds: Arrays by input name.
        io_binding: Whether inputs and outputs are bound to the device, as some sessions need it.

    Raises:
        Exception: Whatever ONNX Runtime raises.
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

    Args:
        session: The session.
        feeds: Arrays by input name, of types that numpy has.

    Raises:
        Exception: Whatever ONNX Runtime raises for a model whose outputs are no tensors.
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

        Args:
            feeds: Arrays of the same shapes and types.
        """
        for name, array in feeds.items():
            self._inputs[name].update_inplace(np.ascontiguousarray(array))

    def outputs(self) -> dict[str, Array]:
        """Returns what the last run answered by output name, copied to the host."""
        return dict(zip(self._names, self._binding.copy_outputs_to_cpu(), strict=True))

    def addresses(self) -> dict[str, int]:
        """Returns where the outputs lie on the device, by name."""
        values = self._binding.get_outputs()
        return {name: value.data_ptr() for name, value in zip(self._names, values, strict=True)}


class BoundRuns:
    """Runs of a session that needs inputs and outputs bound, on batches of any shapes, one at a time.

    Batches of the shapes that come first are run in place, where a CUDA graph may be recorded, and others
    unrecorded, as `run_once` does.

    Args:
        session: The session.
    """

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self._errors = onnxruntime_errors()
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._in_place: BoundRun | None = None

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs on a batch and returns its outputs by name, as arrays on the host.

        Raises:
            Exception: Whatever ONNX Runtime raises.
        """
        shapes = {name: array.shape for name, array in feeds.items()}
        if self._shapes is None:
            answers = run_once(self._session, feeds, io_binding=True)  # they can be run at all
            # Copies, since on the CPU a bound value is the array itself, which is the caller's.
            copies = {name: np.array(array) for name, array in feeds.items()}
            self._shapes, self._in_place = shapes, BoundRun(self._session, copies)
            return answers
        if self._in_place is None or self._shapes != shapes:
            return run_once(self._session, feeds, io_binding=True)
        self._in_place.update(feeds)
        try:
            self._in_place()
        except self._errors:
            # Outputs are bound to the memory of the first run; where their shapes depend on values, no more.
            self._in_place = None
            return run_once(self._session, feeds, io_binding=True)
        return self._in_place.outputs()
