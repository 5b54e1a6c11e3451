"""What a graph says of each input, read without its weights in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.onnx_wire import WireError
from ortprep.children.child import run_child
from ortprep.errors import SourceError
from ortprep.quoting import quoted
from ortprep.stages.fetch.inspection import MAX_INLINE_BYTES, Inspection, describe_model, parse_skeleton
from ortprep.stages.fetch.stage import refuse_what_is_no_model


@dataclass(frozen=True)
class InputUse:
    """How a graph uses one input, as far as its values are only moved, cast or scaled before.

    Attributes:
        operators: Operators that take its values.
        sizes: Sizes of axes that weights settle: the channels of a convolution, the rows of a matrix.
        rank: Number of axes that a convolution or a recurrent operator asks for; None if nothing says so.
        spatial: Axes that a convolution slides over, in order.
        batch: Axis of the batch, where an operator says which.
        roles: What a recurrent operator or a control flow operator takes it for: `state`, `lengths`,
            `condition`, `trip count`.
        compared: Integers that it is compared with.
        scaled_from: Largest value that the graph's own scaling expects: 255 where it divides by 255.
        classes: Number of classes that it is encoded as one of; None if it is not.
        words: Strings that an encoder of the graph knows.
        window: Longest kernel of one axis that slides over it; 0 for none.
    """

    operators: tuple[str, ...] = ()
    sizes: Mapping[int, int] = field(default_factory=dict)
    rank: int | None = None
    spatial: tuple[int, ...] = ()
    batch: int | None = None
    roles: tuple[str, ...] = ()
    compared: tuple[int, ...] = ()
    scaled_from: float | None = None
    classes: int | None = None
    words: tuple[str, ...] = ()
    window: int = 0


@dataclass(frozen=True)
class GraphFacts:
    """What was read from a model.

    Attributes:
        inspection: Its interface, operators and sizes.
        uses: How each input is used, by name.
        nodes: Names of the main graph's nodes, in order.
        half: Whether most of its weights have 16 bits.
        quantized: Whether it holds quantised weights.
    """

    inspection: Inspection
    uses: Mapping[str, InputUse]
    nodes: tuple[str, ...]
    half: bool
    quantized: bool


def read_facts(model: Path, *, timeout_s: float | None = None) -> GraphFacts:
    """Reads a model file in a child process; its weights and external data stay unread.

    Raises:
        SourceError: There is no such file, or it is not an ONNX model.
    """
    if not model.is_file():
        got = "a folder" if model.is_dir() else "none"
        hint = f"find {quoted(model)} -name '*.onnx'" if model.is_dir() else _ls_command(model)
        raise SourceError(f"no such model: {model}\n  expected an ONNX file, got {got}", hint=hint)
    request = {"model": str(model.absolute())}
    reply = run_child(describe_facts, request, timeout_s=timeout_s)
    return decode(GraphFacts, reply.value)


def _ls_command(model: Path) -> str:
    """Returns the nearest folder above a path that exists, for a command."""
    return quoted("ls", next(one for one in model.parents if one.is_dir()))


def describe_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function of `read_facts`.

    Raises:
        SourceError: It is not an ONNX model.
    """
    from ortprep.init.input_use import find_uses, has_quantized_weights, is_mostly_half

    path = Path(request["model"])
    refuse_what_is_no_model(path, str(path))
    if path.stat().st_size > MAX_INLINE_BYTES:
        raise SourceError(
            f"model file too large: {path}\n  expected under 2 GiB, got {path.stat().st_size} bytes",
            hint='onnx.save(onnx.load("model.onnx"), "new.onnx", save_as_external_data=True)   # in Python',
        )
    try:
        model = parse_skeleton(path)
        inspection = describe_model(model)
    except (WireError, ValueError) as error:
        raise SourceError(
            f"not an ONNX model, or an incomplete one: {path}\n  expected a complete ONNX file, got: {error}",
            hint=f"ls -l {quoted(path)}   # then download or export the file again",
        ) from error
    facts = GraphFacts(
        inspection=inspection,
        uses=find_uses(model.graph),
        nodes=tuple(node.name for node in model.graph.node),
        half=is_mostly_half(model),
        quantized=has_quantized_weights(model),
    )
    return dict(encode(facts))
