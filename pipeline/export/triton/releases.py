"""Since which release of Triton its ONNX Runtime backend takes what a model configuration says.

Read from the branches r23.10 to r26.06 of triton-inference-server/onnxruntime_backend. Earlier releases take
an unknown level for all optimisations, and pass over an unknown parameter, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.export.triton.model_config import TritonModel

_DISABLED = 2
_INITIALIZERS = "session.use_device_allocator_for_initializers"


def describe_release(model: TritonModel) -> str:
    """Returns the oldest release that takes all of a configuration, and for what, as a need."""
    needed = max(_needed(model), default=("23.10", "the oldest that was looked at"))
    return f"Triton {needed[0]} or later: {needed[1]}"


def _needed(model: TritonModel) -> Iterator[tuple[str, str]]:
    settings = model.settings
    if settings.level == _DISABLED:
        yield "24.01", "its backend knows level 2, no optimisation"
    if settings.cuda:
        yield "24.06", "its backend knows the accelerator cuda"
    if _INITIALIZERS in settings.parameters:
        yield "25.02", f"its backend knows {_INITIALIZERS}"
    if any(tensor.data_type == "TYPE_BF16" for tensor in (*model.inputs, *model.outputs)):
        yield "26.03", "its backend knows bfloat16"
