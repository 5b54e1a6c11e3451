"""Requests and replies of the graph passes; importable without onnx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PassRequest:
    """Files of a pass.

    Attributes:
        source: Absolute path of the model; its external data is in the same folder.
        written: Absolute path of the model to write, in an empty folder.
    """

    source: str
    written: str


@dataclass(frozen=True, kw_only=True)
class BindRequest(PassRequest):
    """Request of `shapes.bind_shapes`.

    Attributes:
        dimensions: Sizes of 1 and more, by the name of a symbolic dimension, or by `INPUT[AXIS]`, which is
            the only way to call one without a name.
    """

    dimensions: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class FusionRequest(PassRequest):
    """Request of the fusers.

    Attributes:
        model_type: Kind of model, as the library calls it: `bert`, `gpt2`, `vit`, ….
        num_heads: Attention heads; 0 finds them.
        hidden_size: Features per token; 0 finds them.
        disable: Fusions left out, as `FusionOptions` calls them without `enable_`: `attention`, `gelu`, ….
        optional: Whether it is no error if nothing could be fused.
    """

    model_type: str
    num_heads: int = 0
    hidden_size: int = 0
    disable: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class FusionReply:
    """Result of a fuser.

    Attributes:
        fused: How many nodes of an operator there are more than in the source; if empty, nothing was written.
        library: Package and version.
    """

    fused: Mapping[str, int]
    library: str


@dataclass(frozen=True, kw_only=True)
class HalfRequest(PassRequest):
    """Request of `half.convert.convert_half`.

    Attributes:
        dtype: `float16` or `bfloat16`.
        keep_io: Whether inputs and outputs stay float32.
        blocked_operators: Operators that stay float32, besides those that the library keeps.
        blocked_nodes: Names of nodes that stay float32, with all that is in their subgraphs.
        clip: Whether numbers beyond float16's range become its largest; otherwise they are an error.
    """

    dtype: str = "float16"
    keep_io: bool = True
    blocked_operators: tuple[str, ...] = ()
    blocked_nodes: tuple[str, ...] = ()
    clip: bool = False


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest(PassRequest):
    """What every quantisation pass takes.

    Attributes:
        exclude: Names of nodes to leave as they are, as `name_nodes` gives them.
        operators: Operator types to quantise; none for the pass's own choice.
    """

    exclude: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DynamicRequest(QuantizeRequest):
    """Request of `quantize.int8.quantize_dynamic`.

    Attributes:
        per_channel: One scale for each output channel of a weight instead of one for all of it.
    """

    per_channel: bool = True


@dataclass(frozen=True, kw_only=True)
class StaticRequest(QuantizeRequest):
    """Request of `quantize.int8.quantize_static`.

    Attributes:
        samples: Absolute paths of `.npz` files that `check_calibration` accepts.
        method: How ranges follow from what was seen: `minmax`, `entropy` or `percentile`.
        activation: Type of activations: `uint8` or `int8`.
        per_channel: As in `DynamicRequest`.
    """

    samples: tuple[str, ...]
    method: str = "minmax"
    activation: str = "uint8"
    per_channel: bool = True


@dataclass(frozen=True, kw_only=True)
class WeightsRequest(QuantizeRequest):
    """Request of `quantize.weight_only.quantize_weights`.

    Attributes:
        bits: Of a weight: 4 or 8.
        block_size: Weights of one column that share a scale: a power of two, at least 16.
        symmetric: No zero points: a scale alone.
    """

    bits: int = 4
    block_size: int = 128
    symmetric: bool = True


@dataclass(frozen=True)
class PrecisionReply:
    """Result of a pass that changes the precision.

    Attributes:
        nodes: Number of nodes the pass looked at: of the whole model for half precision, of the requested
            operator types for quantisation.
        converted: Names of the nodes that were converted, in topological order.
        kept: Names of those that could not be or were not to be, in topological order.
        too_large: Nodes that use weights beyond the largest half-precision number.
    """

    nodes: int
    converted: tuple[str, ...]
    kept: tuple[str, ...]
    too_large: tuple[str, ...] = ()
