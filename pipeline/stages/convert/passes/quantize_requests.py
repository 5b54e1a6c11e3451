"""What the quantisation passes are asked for, and what they answer; importable without onnx."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest:
    """What every pass is told.

    Attributes:
        source: Absolute path of the model.
        written: Absolute path of the model file to write, in an empty folder.
        exclude: Names of nodes to leave as they are, as `name_nodes` gives them.
        operators: Operator types to quantise; none for the pass's own choice.
    """

    source: str
    written: str
    exclude: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DynamicRequest(QuantizeRequest):
    """What `quantize_dynamic` is asked for.

    Attributes:
        per_channel: One scale for each output channel of a weight instead of one for all of it.
        reduce_range: Weights of 7 bits, which no CPU's 8-bit products can saturate.
    """

    per_channel: bool = True
    reduce_range: bool = False


@dataclass(frozen=True, kw_only=True)
class StaticRequest(QuantizeRequest):
    """What `quantize_static` is asked for.

    Attributes:
        samples: Absolute paths of `.npz` files, each with one array by the name of each input.
        method: How ranges follow from what was seen: `minmax`, `entropy` or `percentile`.
        activation: Type of activations: `uint8` or `int8`.
        per_channel: As in `DynamicRequest`.
        reduce_range: As in `DynamicRequest`.
    """

    samples: tuple[str, ...]
    method: str = "minmax"
    activation: str = "uint8"
    per_channel: bool = True
    reduce_range: bool = False


@dataclass(frozen=True, kw_only=True)
class WeightsRequest(QuantizeRequest):
    """What `quantize_weights` is asked for.

    Attributes:
        bits: Of a weight: 4 or 8.
        block_size: Weights of one column that share a scale: a power of two, at least 16.
        symmetric: No zero points: a scale alone.
        accuracy_level: What the CPU may round activations to for a product: 4 for int8, 1 for float32, 0 for
            what ONNX Runtime chooses.
    """

    bits: int = 4
    block_size: int = 128
    symmetric: bool = True
    accuracy_level: int = 4


@dataclass(frozen=True)
class QuantizeReply:
    """What a pass did.

    Attributes:
        quantized: Names of nodes of the source that were quantised, in topological order.
        kept: Names of nodes of the same operator types that were not: excluded, in a subgraph, or such as
            cannot be, like a MatMul of two activations.
        eligible: Names that a search may exclude, in topological order.
        weights_bytes: Size of all initializers of what was written.
    """

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    eligible: tuple[str, ...]
    weights_bytes: int
