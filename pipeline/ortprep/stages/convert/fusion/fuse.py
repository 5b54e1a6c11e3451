"""Fusion of transformer subgraphs by `onnxruntime.transformers`, the optimizer that comes with ONNX Runtime.

What it has in common with fusion by the older package of the same code is here too, see `fusion_tools`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.codec import decode, encode
from ortprep.errors import MissingExtraError, StageError
from ortprep.quoting import quoted
from ortprep.stages.convert.pass_requests import FusionReply, FusionRequest
from ortprep.versions import install_command

if TYPE_CHECKING:
    import onnx

    from ortprep.stages.convert.fusion.heads import Heads

_PREFIX = "enable_"
_MICROSOFT = "com.microsoft"
_FINDS_HEADS = frozenset({"t5", "swin", "unet", "vae", "clip", "sam2", "mmdit"})
"""Model types whose fusions find heads node by node, and whose layers may differ; as the library says."""

_MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a pattern that half fits a graph makes the optimizer raise; it has no error of its own."""


@dataclass(frozen=True)
class FusionLibrary:
    """One of the packages that fuse.

    Attributes:
        name: Its name on PyPI.
        version: Its version.
        model_types: Kinds of model it knows.
        options: Makes its options for a kind of model; those named `enable_…` turn fusions on.
        optimize: Fuses a model, which it may change, by kind of model, heads and options, and returns its
            wrapper of the model that comes out, an `OnnxModel`.
    """

    name: str
    version: str
    model_types: tuple[str, ...]
    options: Callable[[str], Any]
    optimize: Callable[[onnx.ModelProto, str, Heads, Any], Any]


def fuse(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function, `FusionRequest` to `FusionReply`: fuses with ONNX Runtime's own optimizer.

    Raises:
        StageError: The model type or a fusion is unknown, heads cannot be found, the optimizer fails or
            changes the interface, or nothing is fused.
        MissingExtraError: SymPy, which it needs, is not installed.
    """
    require_sympy()
    import onnxruntime
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import MODEL_TYPES, optimize_model

    from ortprep.stages.convert.fusion.shape_inference import infer_without_copies

    # By this name, and not the package's, its modules import one another.
    infer_without_copies(importlib.import_module("shape_infer_helper").SymbolicShapeInferenceHelper)

    def optimize(model: onnx.ModelProto, model_type: str, heads: Heads, options: Any) -> Any:
        sizes = (heads.num_heads, heads.hidden_size)
        return optimize_model(model, model_type, *sizes, optimization_options=options, opt_level=0)

    def make_options(model_type: str) -> FusionOptions:
        options = FusionOptions(model_type)
        if model_type == "bert":
            # Its default is the number of tokens per sequence, which is wrong for padding on the left.
            options.use_raw_attention_mask()
        return options

    version = onnxruntime.__version__
    library = FusionLibrary("onnxruntime", version, tuple(MODEL_TYPES), make_options, optimize)
    return dict(encode(fuse_with(library, decode(FusionRequest, request))))


def require_sympy() -> None:
    """Checks that symbolic shape inference can be had.

    Raises:
        MissingExtraError: It cannot, and the optimizer would end in the middle of its work.
    """
    try:
        import sympy  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"fusion needs sympy\n  {error}", hint=install_command("build")) from error


def fuse_with(library: FusionLibrary, request: FusionRequest) -> FusionReply:
    """Fuses a model and writes it (child).

    Raises:
        StageError: As `fuse` says.
        OSError: Data is missing, or the disk is full.
    """
    from ortprep.stages.convert.fusion.exporter_forms import write_as_patterns_expect
    from ortprep.stages.convert.fusion.heads import Heads, choose_heads, find_heads
    from ortprep.stages.convert.fusion.interface import Interface
    from ortprep.stages.core.graphs.graph_walk import name_nodes
    from ortprep.stages.core.graphs.inlining import load_with_weights

    source = Path(request.source)
    _check_known("model_type", request.model_type, library.model_types)
    model = load_with_weights(source, source.parent)
    name_nodes(model)
    if request.optional and not request.num_heads and not find_heads(model.graph):
        request = dataclasses.replace(request, disable=(*request.disable, "attention"))
    options = _choose_fusions(library, request)
    operators = _count_operators(model)
    interface = Interface.of(model.graph)
    write_as_patterns_expect(model.graph)
    heads = choose_heads(
        model.graph,
        Heads(request.num_heads, request.hidden_size),
        needed=request.model_type not in _FINDS_HEADS and "attention" not in request.disable,
    )
    optimizer = _optimize(library, request, model, heads, options)
    model = optimizer.model
    interface.restore(model.graph, hint="another fusion: {model_type: …}, or fusion: {disable: [attention]}")
    fused = _count_fused(optimizer, operators)
    if fused:
        _write(model, Path(request.written))
    elif not request.optional:
        raise _nothing_fused(library, request)
    return FusionReply(fused, f"{library.name} {library.version}")


def _choose_fusions(library: FusionLibrary, request: FusionRequest) -> Any:
    options = library.options(request.model_type)
    fusions = tuple(sorted(name.removeprefix(_PREFIX) for name in vars(options) if name.startswith(_PREFIX)))
    for fusion in request.disable:
        _check_known("disable", fusion, fusions)
        setattr(options, _PREFIX + fusion, False)
    return options


def _check_known(field: str, name: str, choices: tuple[str, ...]) -> None:
    if name in choices:
        return
    nearest = [*difflib.get_close_matches(name, choices, n=1), choices[0]][0]
    is_one = field == "model_type"
    raise StageError(
        f"unknown {field} for fusion: {name!r}\n  expected one of {', '.join(choices)}",
        hint=f"fusion: {{model_type: {quoted(nearest)}}}"
        if is_one
        else f"fusion: {{{quoted(field)}: [{quoted(nearest)}]}}",
    )


def _optimize(
    library: FusionLibrary, request: FusionRequest, model: onnx.ModelProto, heads: Heads, options: Any
) -> Any:
    try:
        return library.optimize(model, request.model_type, heads, options)
    except _MISFITS as error:
        raise StageError(
            f"fusion failed: model_type {request.model_type} of {library.name} {library.version}\n"
            f"  expected a graph that its patterns match, got {type(error).__name__}: {error}",
            hint="fusion: {disable: [attention]}  (or the fusion whose pattern does not match)",
        ) from error


def _count_operators(model: onnx.ModelProto) -> Counter[tuple[str, str]]:
    return Counter((node.domain, node.op_type) for node in model.graph.node)


def _count_fused(optimizer: Any, before: Counter[tuple[str, str]]) -> dict[str, int]:
    """Counts what the library's statistics do, and the contrib operators that they leave out."""
    listed = optimizer.get_fused_operator_statistics()
    added = _count_operators(optimizer.model) - before
    fused: Counter[str] = Counter()
    for (domain, operator), count in sorted(added.items()):
        if operator in listed or domain == _MICROSOFT:
            fused[operator] += count
    return dict(fused)


def _nothing_fused(library: FusionLibrary, request: FusionRequest) -> StageError:
    return StageError(
        f"fusion found nothing to fuse: model_type {request.model_type}\n"
        f"  expected a graph that the patterns of {library.name} {library.version} match",
        hint=f"fusion: {{model_type: {quoted(request.model_type)}, optional: true}}  "
        f"(or another of {', '.join(map(quoted, library.model_types))})",
    )


def _write(model: onnx.ModelProto, written: Path) -> None:
    from ortprep.stages.convert.weights import WeightWriter, move_weights
    from ortprep.stages.core.graphs.graph_walk import walk_nodes

    declared = any(opset.domain == _MICROSOFT for opset in model.opset_import)
    if not declared and any(node.domain == _MICROSOFT for node in walk_nodes(model)):
        model.opset_import.add(domain=_MICROSOFT, version=1)
    with WeightWriter(written) as weights:
        move_weights(model, written.parent, weights)
    written.write_bytes(model.SerializeToString(deterministic=True))
