"""Which pass does what the spec asks for, and what it is told. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.spec.conversion import Convert, Fusion
from pipeline.stages.convert.passes.fusion import FUSERS

_PASSES = "pipeline.stages.convert.passes"
_PRODUCTS = ("MatMul", "Gemm", "LSTM", "GRU", "com.microsoft.Attention")


@dataclass(frozen=True)
class PassCall:
    """A pass that is to be run in a process of its own.

    Attributes:
        name: For records, as `PassRecord.name` has it.
        function: `module:function` of the child.
        request: What it is told besides `source` and `written`, as JSON types.
    """

    name: str
    function: str
    request: Mapping[str, Any]


def call_of(
    convert: Convert,
    precision: str,
    *,
    mode: str = "dynamic",
    kept: Sequence[str] = (),
    clip: bool = False,
    samples: Sequence[Path] = (),
) -> PassCall:
    """Returns the pass that makes a precision.

    Args:
        convert: The spec's section.
        precision: `fp16`, `mixed`, `bf16`, `int8` or `int4`.
        mode: How int8 is made, as `choose_mode` returns it.
        kept: Nodes that stay in fp32 besides those of the spec.
        clip: Whether weights that do not fit are clipped, whatever the spec says.
        samples: What ranges are calibrated with.
    """
    build: Mapping[str, Callable[[], PassCall]] = {
        "fp16": lambda: _half(convert, "float16", kept, clip=clip),
        "mixed": lambda: _half(convert, "float16", kept, clip=clip),
        "bf16": lambda: _half(convert, "bfloat16", kept, clip=clip),
        "int8": lambda: _quantized(convert, mode, 8, kept, samples),
        "int4": lambda: _quantized(convert, "weight_only", 4, kept, samples),
    }
    return build[precision]()


def fusion_call(fusion: Fusion) -> PassCall:
    """Returns the pass that fuses transformer subgraphs."""
    name = "fusion" if fusion.library == "onnxruntime" else f"fusion ({fusion.library})"
    request = fusion.model_dump(mode="json", exclude={"library"})
    return PassCall(name, FUSERS[fusion.library], request)


def bind_call(binding: Mapping[str, int]) -> PassCall:
    """Returns the pass that binds symbolic dimensions."""
    return PassCall("shapes", f"{_PASSES}.shapes:bind_shapes", {"dimensions": dict(binding)})


def _half(convert: Convert, dtype: str, kept: Sequence[str], *, clip: bool) -> PassCall:
    half = convert.half
    return PassCall(
        {"float16": "fp16", "bfloat16": "bf16"}[dtype],
        f"{_PASSES}.half:convert_half",
        {
            "dtype": dtype,
            # Neither numpy nor a job has bf16 to feed.
            "keep_io": half.keep_io or dtype == "bfloat16",
            "blocked_operators": list(half.block_operators),
            "blocked_nodes": sorted({*half.keep_nodes, *kept}),
            "clip": clip or half.clip,
        },
    )


def choose_mode(convert: Convert, target: str, operators: Mapping[str, int]) -> str:
    """Returns how int8 is made where the spec leaves it open.

    ONNX Runtime 1.31's CUDA provider has no kernel for what dynamic quantisation writes, and none for
    calibrated integers that would be faster than floats; it has `MatMulNBits`. On the CPU a convolution whose
    activations are quantised as they come is slower than in fp32 (SqueezeNet: 65 ms against 19), with
    calibrated ranges it is faster (7 ms).

    Args:
        convert: The spec's section.
        target: `cpu` or `cuda`.
        operators: Nodes of the model by operator.
    """
    if convert.quantize.mode != "auto":
        return convert.quantize.mode
    if target == "cuda":
        return "weight_only"
    products = sum(operators.get(name, 0) for name in _PRODUCTS)
    return "static" if operators.get("Conv", 0) > products else "dynamic"


def _quantized(
    convert: Convert, mode: str, bits: int, kept: Sequence[str], samples: Sequence[Path]
) -> PassCall:
    quantize = convert.quantize
    common = {
        "exclude": sorted({*quantize.exclude, *kept}),
        "operators": list(quantize.operators),
        "per_channel": quantize.per_channel,
    }
    if mode == "weight_only":
        block = {"block_size": quantize.block_size, "symmetric": quantize.symmetric}
        more: dict[str, Any] = {"bits": bits, **block}
        function = f"{_PASSES}.quantize_weights:quantize_weights"
        return PassCall(f"int{bits}-weights", function, {**common, **more})
    if mode == "static":
        more = {
            "samples": [str(sample) for sample in samples],
            "method": quantize.calibration.method,
            "activation": quantize.activation,
        }
        return PassCall("int8-static", f"{_PASSES}.quantize_static:quantize_static", {**common, **more})
    return PassCall("int8-dynamic", f"{_PASSES}.quantize_dynamic:quantize_dynamic", common)
