"""Runs with inputs and outputs bound to the session's device, so that nothing is copied between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pipeline.runtime.session import CUDA
from pipeline.runtime.tensors import run_session

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.runtime.element_types import Array


def run_once(
    session: onnxruntime.InferenceSession, feeds: Mapping[str, Array], *, io_binding: bool
) -> dict[str, Array]:
    """Runs a session once and returns its outputs by name, as arrays on the host.

    Args:
        session: The session.
        feeds: Arrays by input name.
        io_binding: Whether inputs and outputs are bound to the device, as some sessions need it.

    Raises:
        Exception: Whatever ONNX Runtime raises.
    """
    if not io_binding:
        return run_session(session, feeds)
    binding = bind_run(session, feeds)()
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, binding.copy_outputs_to_cpu(), strict=True))


def bind_run(
    session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]
) -> Callable[[], onnxruntime.IOBinding]:
    """Binds inputs, once copied, and outputs to the session's device, and returns what runs the session.

    Addresses stay the same from run to run, as recorded CUDA graphs need it: outputs are bound to the memory
    that the first run gave them.

    Args:
        session: The session.
        feeds: Arrays by input name, of types that numpy has.

    Raises:
        Exception: Whatever ONNX Runtime raises for a model whose outputs are no tensors.
    """
    import onnxruntime

    on_gpu = CUDA in session.get_providers()
    device = "cuda" if on_gpu else "cpu"
    options = session.get_provider_options().get(CUDA, {})
    ordinal = int(options.get("device_id", "0")) if on_gpu else 0
    binding = session.io_binding()
    for name, array in feeds.items():
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array, device, ordinal)
        binding.bind_ortvalue_input(name, value)
    names = [output.name for output in session.get_outputs()]
    for name in names:
        binding.bind_output(name, device, ordinal)
    is_bound = False

    def run() -> onnxruntime.IOBinding:
        nonlocal is_bound
        session.run_with_iobinding(binding)
        if not is_bound:
            for name, value in zip(names, binding.get_outputs(), strict=True):
                binding.bind_ortvalue_output(name, value)
            is_bound = True
        return binding

    return run
