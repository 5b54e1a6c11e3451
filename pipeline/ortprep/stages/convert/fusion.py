"""Fusion of transformer subgraphs, by ONNX Runtime's optimizer or by the older package that it came from.

`onnxruntime.transformers` comes with ONNX Runtime. The last release of onnxruntime-tools, 1.7.0, knows five
kinds of model and opsets up to 12, since its shape inference fails at `Unsqueeze` of opset 13. It is
given the shape inference of the installed ONNX Runtime, which has kept that class's interface. One process
can have only one of the two: their modules have the same names. For child processes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from ortprep.errors import MissingExtraError, StageError, require_known
from ortprep.quoting import quoted
from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.convert.weights import keep_real_inputs, move_weights
from ortprep.stages.core.graphs.graph_walk import load_with_weights, name_nodes, values_bytes, walk_nodes
from ortprep.versions import install_command

_PREFIX = "enable_"
_MICROSOFT = "com.microsoft"
_FINDS_HEADS = frozenset({"t5", "swin", "unet", "vae", "clip", "sam2", "mmdit"})
"""Model types whose fusions find heads node by node, and whose layers may differ; as the library says."""

_SHAPE_INFERENCE = "shape_infer_helper"
_COPIED_BYTES = 1024


class _Library(NamedTuple):
    """A package that fuses.

    Attributes:
        name: Its name and version.
        model_types: Kinds of model it knows.
        options: Makes its options for a kind of model; those named `enable_…` turn fusions on.
        optimize: Fuses a model by kind of model, heads and options; returns its wrapper, an `OnnxModel`.
    """

    name: str
    model_types: tuple[str, ...]
    options: Callable[[str], Any]
    optimize: Callable[[onnx.ModelProto, str, Heads, Any], Any]


def fuse(request: PassRequest) -> PassReply:
    """Fuses a model and writes it.

    Raises:
        SpecError: The model type or a fusion is unknown.
        StageError: Heads cannot be found, the optimizer fails or changes the interface, or nothing is fused.
        MissingExtraError: The package is not installed.
        OSError: Data is missing, or the disk is full.
    """
    fusion = request.fusion
    assert fusion is not None
    library = _own() if fusion.library == "onnxruntime" else _tools()
    require_known(
        "model_type for fusion",
        fusion.model_type,
        library.model_types,
        hint=lambda near: f"fusion: {{model_type: {quoted(near)}}}",
    )
    model = load_with_weights(request.source)
    keep_real_inputs(model)
    name_nodes(model)
    inputs, outputs = list(model.graph.input), list(model.graph.output)
    operators, read = _count_operators(model), _names_read(model)
    options = _options_without(fusion.disable, library.options(fusion.model_type))

    # Fuse.
    rewrite_as_patterns_expect(model.graph)
    heads = Heads(fusion.num_heads, fusion.hidden_size)
    if fusion.model_type not in _FINDS_HEADS and "attention" not in fusion.disable:
        heads = choose_heads(model.graph, heads)
    optimizer = library.optimize(model, fusion.model_type, heads, options)
    model = optimizer.model
    unread = {value.name for value in inputs if value.name in read} - _names_read(model)
    if unread or list(model.graph.output) != outputs:
        raise StageError(
            f"fusion changed {'inputs' if unread else 'outputs'} of the model: {', '.join(sorted(unread))}",
            hint="another fusion: {model_type: …}, or fusion: {disable: [attention]}",
        )
    del model.graph.input[:]
    model.graph.input.extend(inputs)

    # Count, with ONNX Runtime's operators that the library's statistics leave out, and write.
    listed = optimizer.get_fused_operator_statistics()
    fused: Counter[str] = Counter()
    for (domain, operator), count in sorted((_count_operators(model) - operators).items()):
        if operator in listed or domain == _MICROSOFT:
            fused[operator] += count
    if not fused:
        raise StageError(
            f"fusion found nothing to fuse: model_type {fusion.model_type}\n"
            f"  expected a graph that the patterns of {library.name} match",
            hint=f"fusion: {{model_type: …}}  (one of {', '.join(map(quoted, library.model_types))})",
        )
    if all(opset.domain != _MICROSOFT for opset in model.opset_import):
        model.opset_import.add(domain=_MICROSOFT, version=1)
    move_weights(model, request.source.parent, request.written)
    onnx.save(model, request.written)
    return PassReply(fused=dict(fused), library=library.name)


def _options_without(disabled: Iterable[str], options: Any) -> Any:
    """Returns a library's options with some fusions off; raises SpecError for one that it does not have."""
    known = sorted(name.removeprefix(_PREFIX) for name in vars(options) if name.startswith(_PREFIX))
    for name in disabled:
        require_known(
            "fusion to disable", name, known, hint=lambda near: f"fusion: {{disable: [{quoted(near)}]}}"
        )
        setattr(options, _PREFIX + name, False)
    return options


def _own() -> _Library:
    """Returns ONNX Runtime's optimizer."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import MODEL_TYPES, optimize_model

    # By this name, and not the package's, its modules import one another.
    _infer_without_copies(importlib.import_module(_SHAPE_INFERENCE).SymbolicShapeInferenceHelper)

    def make_options(model_type: str) -> FusionOptions:
        options = FusionOptions(model_type)
        if model_type == "bert":
            # Its default is the number of tokens per sequence, which is wrong for padding on the left.
            options.use_raw_attention_mask()
        return options

    def optimize(model: onnx.ModelProto, model_type: str, heads: Heads, options: Any) -> Any:
        return optimize_model(model, model_type, *heads, optimization_options=options, opt_level=0)

    return _Library(f"onnxruntime {onnxruntime.__version__}", tuple(MODEL_TYPES), make_options, optimize)


def _tools() -> _Library:
    """Returns the optimizer of onnxruntime-tools, with the shape inference of ONNX Runtime."""
    path = Path(onnxruntime.__file__).parent / "transformers" / f"{_SHAPE_INFERENCE}.py"
    # Its other modules have to be its own, even if ONNX Runtime's folder of the same names is on the path.
    sys.path[:] = [entry for entry in sys.path if Path(entry) != path.parent]
    spec = importlib.util.spec_from_file_location(_SHAPE_INFERENCE, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_SHAPE_INFERENCE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_SHAPE_INFERENCE])
    _infer_without_copies(sys.modules[_SHAPE_INFERENCE].SymbolicShapeInferenceHelper)
    try:
        from onnxruntime_tools.transformers.optimizer import (  # type: ignore[import-not-found,unused-ignore]
            MODEL_CLASSES,
            BertOptimizationOptions,
        )
    except ImportError as error:
        raise MissingExtraError(
            f"cannot import onnxruntime-tools\n  {error}", hint=install_command("onnxruntime-tools")
        ) from error

    def optimize(model: onnx.ModelProto, model_type: str, heads: Heads, options: Any) -> Any:
        # Its optimize_model wants a file, which it always has ONNX Runtime rewrite first.
        optimizer = MODEL_CLASSES[model_type][0](model, *heads)
        optimizer.optimize(options)
        return optimizer

    name = f"onnxruntime-tools {importlib.metadata.version('onnxruntime-tools')}"
    return _Library(name, tuple(MODEL_CLASSES), BertOptimizationOptions, optimize)


def _infer_without_copies(inference: Any) -> None:
    """Patches a shape inference class, which copies a model again and again, to leave out large weights."""
    prepare = inference._preprocess

    def prepare_sharing(self: Any, model: onnx.ModelProto) -> None:
        skeleton = onnx.ModelProto(ir_version=model.ir_version, functions=model.functions)
        skeleton.opset_import.extend(model.opset_import)
        for field in ("node", "input", "output", "value_info", "sparse_initializer"):
            getattr(skeleton.graph, field).extend(getattr(model.graph, field))
        for weight in model.graph.initializer:
            copied = skeleton.graph.initializer.add(
                name=weight.name, data_type=weight.data_type, dims=weight.dims
            )
            if values_bytes(weight) < _COPIED_BYTES:
                copied.CopyFrom(weight)
        prepare(self, skeleton)
        self.initializers_ = {weight.name: weight for weight in model.graph.initializer}

    inference._preprocess = prepare_sharing


def _names_read(model: onnx.ModelProto) -> set[str]:
    return {name for node in walk_nodes(model) for name in node.input}


def _count_operators(model: onnx.ModelProto) -> Counter[tuple[str, str]]:
    return Counter((node.domain, node.op_type) for node in model.graph.node)


_SMALL_ELEMENTS = 16
_UNKNOWN = -2


class Heads(NamedTuple):
    """Sizes of multi-head attention.

    Attributes:
        num_heads: Attention heads; 0 if not known.
        hidden_size: Features per token, of all heads together; 0 if not known.
    """

    num_heads: int = 0
    hidden_size: int = 0


def choose_heads(graph: onnx.GraphProto, given: Heads) -> Heads:
    """Returns the likeliest attention sizes that a graph shows, of those that agree with what the user says.

    Raises:
        StageError: The graph contradicts the user, or neither says how many heads there are.
    """
    cuts = find_heads(graph)
    for cut in cuts:
        if given.num_heads in (0, cut.num_heads) and given.hidden_size in (0, cut.hidden_size):
            return cut
    if not cuts and all(given):
        return given
    # Most patterns take a wrong number, and the model then answers wrongly.
    listed = ", ".join(f"{cut.num_heads} heads of {cut.hidden_size // cut.num_heads}" for cut in cuts)
    shown = Heads(12, 768) if not cuts else cuts[0]
    raise StageError(
        f"cannot fuse attention: num_heads {given.num_heads}, hidden_size {given.hidden_size}\n"
        f"  expected {listed or 'both to be set, since the graph shows no heads in its Reshape nodes'}",
        hint=f"fusion: {{num_heads: {shown.num_heads:d}, hidden_size: {shown.hidden_size:d}}}",
    )


def find_heads(graph: onnx.GraphProto) -> tuple[Heads, ...]:
    """Returns every way in which a graph cuts tokens into heads, the likeliest first; () if there is none.

    A cut is a `Reshape` to [batch, sequence, heads, size], or to [batch, sequence, 3, heads, size] if
    queries, keys and values are one tensor, whose heads a `Transpose` then moves before the tokens. Its sizes
    may be one constant, or the last two parts of a `Concat`, and -1 for the number of heads means as many as
    make up the width of the normalisations. Cuts into heads that make up the width of the normalisations come
    first: those of keys and values may have fewer heads than those of queries.

    Args:
        graph: The graph; tensors of up to 16 elements must have their values.
    """
    constants = _constants(graph)
    producers = {name: node for node in graph.node for name in node.output}
    dims = {weight.name: tuple(weight.dims) for weight in graph.initializer}
    # Scale and bias; of those with a skip, the second input is no initializer and the third is the scale.
    normalised = [
        name for node in graph.node if node.op_type.endswith("Normalization") for name in node.input[1:3]
    ]
    widths = Counter(dims[name][-1] for name in normalised if len(dims.get(name, ())) == 1)
    width = max(widths, key=lambda size: (widths[size], size), default=0)
    cuts: Counter[Heads] = Counter()
    for node in graph.node:
        reshape = producers.get(node.input[0]) if node.op_type == "Transpose" else None
        if reshape is None or reshape.op_type != "Reshape":
            continue
        sizes = _sizes(reshape.input[1], constants, producers)
        order = next((list(item.ints) for item in node.attribute if item.name == "perm"), [])
        if len(sizes) in (4, 5) and len(order) == len(sizes) and order[-2] != len(sizes) - 2:
            heads = width // sizes[-1] if sizes[-2] == -1 else sizes[-2]
            cuts[Heads(heads, heads * sizes[-1])] += 1
    cuts.pop(Heads(), None)
    return tuple(sorted(cuts, key=lambda cut: (cut.hidden_size != width, -cuts[cut], -cut.num_heads)))


def _sizes(
    name: str, constants: Mapping[str, tuple[int, ...]], producers: Mapping[str, onnx.NodeProto]
) -> tuple[int, ...]:
    """Returns what a `Reshape` reshapes to, if the last two sizes are known, else ()."""
    concat = producers.get(name)
    sizes = constants.get(name, ())
    if not sizes and concat is not None and concat.op_type == "Concat":
        sizes = tuple(size for part in concat.input for size in constants.get(part, (_UNKNOWN,)))
    is_known = len(sizes) > 2 and sizes[-1] > 0 and sizes[-2] not in (0, _UNKNOWN)
    return sizes if is_known else ()


def _constants(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Returns the values of small vectors of int64: initializers, and what `Constant` nodes give."""
    tensors = {weight.name: weight for weight in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            tensors[node.output[0]] = attribute.t
    return {
        name: tuple(int(size) for size in numpy_helper.to_array(tensor).reshape(-1))
        for name, tensor in tensors.items()
        if tensor.data_type == TensorProto.INT64 and math.prod(tensor.dims) <= _SMALL_ELEMENTS
    }


def rewrite_as_patterns_expect(graph: onnx.GraphProto) -> None:
    """Rewrites what PyTorch's exporter writes today as the patterns of the older one, of TorchScript.

    Each rewrite is for one difference that hides the attention of a plain BERT from them (seen with PyTorch
    2.13 and ONNX Runtime 1.31.1), and leaves what a graph computes as it is.
    """
    constants = {weight.name: weight for weight in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    added: dict[str, TensorProto] = {}
    for node in graph.node:
        _divide_scores(node, producers, constants, added)
    nodes = [part for node in graph.node for part in _split_unsqueeze(node, constants, added)]
    graph.initializer.extend(added.values())
    del graph.node[:]
    graph.node.extend(nodes)


def _divide_scores(
    softmax: onnx.NodeProto,
    producers: Mapping[str, onnx.NodeProto],
    constants: Mapping[str, TensorProto],
    added: dict[str, TensorProto],
) -> None:
    """Divides attention scores instead of multiplying them, if their mask is a product too.

    The pattern takes the first of the two summed products for the mask.
    """
    total = producers.get(softmax.input[0]) if softmax.op_type == "Softmax" else None
    parts = [producers.get(name) for name in total.input] if total is not None else []
    if len(parts) != 2 or any(part is None or part.op_type != "Mul" for part in parts):
        return
    scores = parts[0]
    assert scores is not None
    product, factor = producers.get(scores.input[0]), constants.get(scores.input[1])
    if product is None or product.op_type != "MatMul" or factor is None or factor.dims:
        return
    divisor = f"{scores.name}/divisor"
    added[divisor] = numpy_helper.from_array(np.reciprocal(numpy_helper.to_array(factor)), divisor)
    scores.op_type, scores.input[1] = "Div", divisor


def _split_unsqueeze(
    node: onnx.NodeProto, constants: Mapping[str, TensorProto], added: dict[str, TensorProto]
) -> Iterator[onnx.NodeProto]:
    """Splits an `Unsqueeze` of several axes into one node per axis: `mask[:, None, None, :]`."""
    # Before opset 13 the axes are an attribute, and exporters make one node for each.
    axes = constants.get(node.input[1]) if node.op_type == "Unsqueeze" and len(node.input) == 2 else None
    # Each axis counts those before it, so that in this order every node puts its axis where it ends up.
    order = [] if axes is None else sorted(int(axis) for axis in numpy_helper.to_array(axes).reshape(-1))
    if len(order) < 2 or order[0] < 0:
        yield node
        return
    value = node.input[0]
    for axis in order:
        constant = f"{node.name}/axes_{axis}"
        added[constant] = numpy_helper.from_array(np.array([axis], np.int64), constant)
        output = node.output[0] if axis == order[-1] else f"{node.output[0]}/unsqueezed_{axis}"
        yield helper.make_node("Unsqueeze", [value, constant], [output], name=f"{node.name}/{axis}")
        value = output
