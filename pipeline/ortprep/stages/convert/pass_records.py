"""What the child process of a graph pass takes and answers; importable without onnx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ortprep.spec.conversion import FusionSpec, QuantizeSpec


@dataclass(frozen=True, kw_only=True)
class PassRequest:
    """The files of a pass, and what it reads of the spec.

    Attributes:
        name: `fusion`, `fp16`, `bf16`, `int8-dynamic`, `int8-static`, `int8-weights` or `int4-weights`.
        source: Absolute path of the model; its external data is in the same folder.
        written: Absolute path of the model to write, in an empty folder; with `measures_errors`, of the one
            that the same request wrote without it.
        fusion: For `fusion`.
        keep_nodes: For a precision: nodes that stay as they are, by name.
        quantize: For quantisation.
        samples: For `int8-static`: `.npz` files of arrays by input name.
        measures_errors: For `int8-static`: whether to write nothing, and measure each node's error in what
            was written, on the first sample.
    """

    name: str
    source: Path
    written: Path
    fusion: FusionSpec | None = None
    keep_nodes: tuple[str, ...] = ()
    quantize: QuantizeSpec = field(default_factory=QuantizeSpec)
    samples: tuple[Path, ...] = ()
    measures_errors: bool = False


@dataclass(frozen=True, kw_only=True)
class PassReply:
    """What a pass did.

    Attributes:
        fused: How many nodes of an operator fusion added.
        library: Package and version that fused.
        nodes: Number of nodes that a precision looked at: of the whole model for half precision, of the
            requested operator types for quantisation.
        converted: Names of the nodes that were converted, in topological order.
        kept: Names of those that could not be or were not to be, in topological order.
        errors: By converted node: noise to signal of what it gives by itself, as a ratio of amplitudes.
    """

    fused: Mapping[str, int] = field(default_factory=dict)
    library: str = ""
    nodes: int = 0
    converted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
