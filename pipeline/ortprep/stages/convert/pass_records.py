"""What the children of `convert` take and answer; importable without onnx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ortprep.spec.conversion import FusionSpec, HalfSpec, QuantizeSpec


@dataclass(frozen=True, kw_only=True)
class PassRequest:
    """The files of a pass, and what it reads of the spec.

    Attributes:
        source: Absolute path of the model; its external data is in the same folder.
        written: Absolute path of the model to write, in an empty folder.
        dimensions: To bind shapes: sizes of 1 and more, by the name of a symbolic dimension, or by
            `INPUT[AXIS]` for one without a name.
        fusion: To fuse the subgraphs of transformers.
        name: To change the precision: `fp16`, `bf16`, `int8-dynamic`, `int8-static`, `int8-weights` or
            `int4-weights`.
        half: For half precision; `keep_nodes` includes what a search keeps.
        quantize: For quantisation; `exclude` includes what a search keeps.
        samples: For `int8-static`: `.npz` files that `check_calibration` accepts.
    """

    source: Path
    written: Path
    dimensions: Mapping[str, int] = field(default_factory=dict)
    fusion: FusionSpec | None = None
    name: str = ""
    half: HalfSpec = field(default_factory=HalfSpec)
    quantize: QuantizeSpec = field(default_factory=QuantizeSpec)
    samples: tuple[Path, ...] = ()


@dataclass(frozen=True)
class FusionReply:
    """What was fused.

    Attributes:
        fused: How many nodes of an operator were added; if empty, nothing was written.
        library: Package and version.
    """

    fused: Mapping[str, int]
    library: str


@dataclass(frozen=True)
class PrecisionReply:
    """Which nodes were converted.

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
