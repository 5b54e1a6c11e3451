"""How much memory a graph pass takes, known before it starts. Pure but for asking what is available."""

from __future__ import annotations

from pipeline.errors import ResourceError
from pipeline.runtime.memory import available_bytes

FACTORS = {
    "fusion": (1.4, 2.2),
    "fusion (onnxruntime-tools)": (1.4, 2.2),
    "int8-dynamic": (3.1, 3.1),
    "int8-static": (3.1, 3.1),
}
"""Largest resident set of each pass whose library holds the whole model, in sizes of its weights: where they
are in external data, and where they are in the model file.

Measured as docs/convert.md says; passes that are not named stream weights, tensor by tensor.
"""

_OVERHEAD_BYTES = 300 * 2**20
_WORTH_SAYING_BYTES = 2**30


def needed_bytes(pass_name: str, weights_bytes: int, *, external: bool) -> int | None:
    """Returns what a pass takes at its peak; None for one that never holds more than a tensor or two."""
    factors = FACTORS.get(pass_name)
    return None if factors is None else int(factors[not external] * weights_bytes) + _OVERHEAD_BYTES


def require_memory(pass_name: str, weights_bytes: int, *, external: bool) -> str | None:
    """Returns a line that says what a pass needs, where that is worth saying.

    Raises:
        ResourceError: There is not as much.
    """
    needed = needed_bytes(pass_name, weights_bytes, external=external)
    if needed is None or needed < _WORTH_SAYING_BYTES:
        return None
    available = available_bytes()
    if needed > available:
        raise ResourceError(
            f"not enough memory for {pass_name}, whose library holds the whole model\n"
            f"  expected {needed / 2**30:.1f} GiB, got {available / 2**30:.1f} GiB",
            hint="convert: {quantize: {mode: weight_only}} streams its weights, as fp16 and bf16 do; "
            "or a machine with more memory",
        )
    return f"{pass_name} holds the whole model: about {needed / 2**30:.1f} of {available / 2**30:.1f} GiB"
