"""Fusion of transformer subgraphs, by ONNX Runtime's optimizer or by the older package that it came from.

`onnxruntime.transformers` comes with ONNX Runtime. The last release of onnxruntime-tools, 1.7.0, knows five
kinds of model and opsets up to 12, since its shape inference fails at `Unsqueeze` of opset 13. It is
given the shape inference of the installed ONNX Runtime, which has kept that class's interface. One process
can have only one of the two: their modules have the same names. For child processes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
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
from ortprep.spec.conversion import FusionSpec
from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.convert.weights import keep_real_inputs, move_weights
from ortprep.stages.core.graph_walk import load_with_weights, name_nodes, values_bytes, walk_nodes
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
        optimize: Fuses a model as the spec says, with options; returns its wrapper, an `OnnxModel`.
    """

    name: str
    model_types: tuple[str, ...]
    options: Callable[[str], Any]
    optimize: Callable[[onnx.ModelProto, FusionSpec, Any], Any]


def fuse(request: PassRequest) -> PassReply:
    """Fuses a model and writes it.

    Raises:
        SpecError: The model type or a fusion is unknown.
        StageError: Heads are missing in the spec, the optimizer fails or changes the interface, or nothing is
            fused.
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
    _refuse_formulas()
    rewrite_as_patterns_expect(model.graph)
    if fusion.model_type not in _FINDS_HEADS and "attention" not in fusion.disable:
        _require_heads(fusion)
    optimizer = library.optimize(model, fusion, options)
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


def _require_heads(fusion: FusionSpec) -> None:
    """Raises `StageError` without sizes of attention: most patterns take a wrong one, and answer wrongly."""
    if not (fusion.num_heads and fusion.hidden_size):
        raise StageError(
            f"cannot fuse attention: num_heads {fusion.num_heads}, hidden_size {fusion.hidden_size}\n"
            "  expected both to be set, as the model's configuration has them",
            hint=f"fusion: {{model_type: {quoted(fusion.model_type)}, num_heads: N, hidden_size: N}}, "
            "or fusion: {disable: [attention]}",
        )


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

    def optimize(model: onnx.ModelProto, fusion: FusionSpec, options: Any) -> Any:
        heads = fusion.num_heads, fusion.hidden_size
        return optimize_model(model, fusion.model_type, *heads, optimization_options=options, opt_level=0)

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

    def optimize(model: onnx.ModelProto, fusion: FusionSpec, options: Any) -> Any:
        # Its optimize_model wants a file, which it always has ONNX Runtime rewrite first.
        optimizer = MODEL_CLASSES[fusion.model_type][0](model, fusion.num_heads, fusion.hidden_size)
        optimizer.optimize(options)
        return optimizer

    name = f"onnxruntime-tools {importlib.metadata.version('onnxruntime-tools')}"
    return _Library(name, tuple(MODEL_CLASSES), BertOptimizationOptions, optimize)


def _refuse_formulas() -> None:
    """Has sympy take no text for a formula: it evaluates text as Python.

    The libraries' shape inference passes it the strings of a model, which has nothing but numbers to infer.
    """
    from sympy.core.sympify import SympifyError
    from sympy.parsing import sympy_parser

    def refuse(text: object, *_: object, **__: object) -> None:
        raise SympifyError(f"the text of a model is no formula: {str(text)[:40]!r}")

    sympy_parser.parse_expr = refuse  # `sympify` looks it up at each call


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
