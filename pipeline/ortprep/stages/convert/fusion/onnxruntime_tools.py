"""Fusion of transformer subgraphs by onnxruntime-tools, from which `onnxruntime.transformers` came.

Its last release, 1.7.0 of 2021, knows five kinds of model and opsets up to 12: its shape inference fails at
`Unsqueeze` of opset 13. Its fusions do not mind, so they are given the shape inference of the installed ONNX
Runtime, which has kept that class's interface.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.codec import decode, encode
from ortprep.errors import MissingExtraError
from ortprep.stages.convert.fusion.fuse import FusionLibrary, fuse_with, require_sympy
from ortprep.stages.convert.pass_requests import FusionRequest
from ortprep.versions import install_command

if TYPE_CHECKING:
    import onnx

    from ortprep.stages.convert.fusion.heads import Heads

_SHAPE_INFERENCE = "shape_infer_helper"


def fuse_with_tools(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function, as `fuse`: fuses with onnxruntime-tools, in a process that has no other optimizer.

    Raises:
        StageError: As `ortprep.stages.convert.fusion.fuse.fuse` says.
        MissingExtraError: onnxruntime-tools, or SymPy, is not installed.
    """
    require_sympy()
    _provide_shape_inference()
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
        optimizer = MODEL_CLASSES[model_type][0](model, heads.num_heads, heads.hidden_size)
        optimizer.optimize(options)
        return optimizer

    version = importlib.metadata.version("onnxruntime-tools")
    model_types = tuple(MODEL_CLASSES)
    library = FusionLibrary("onnxruntime-tools", version, model_types, BertOptimizationOptions, optimize)
    return dict(encode(fuse_with(library, decode(FusionRequest, request))))


def _provide_shape_inference() -> None:
    """Loads ONNX Runtime's shape inference under the name by which onnxruntime-tools imports its own.

    Its other modules have to be its own, even if ONNX Runtime's folder of the same names is on the path.
    """
    import onnxruntime

    from ortprep.stages.convert.fusion.shape_inference import infer_without_copies

    path = Path(onnxruntime.__file__).parent / "transformers" / f"{_SHAPE_INFERENCE}.py"
    sys.path[:] = [entry for entry in sys.path if Path(entry) != path.parent]
    spec = importlib.util.spec_from_file_location(_SHAPE_INFERENCE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SHAPE_INFERENCE] = module
    spec.loader.exec_module(module)
    infer_without_copies(module.SymbolicShapeInferenceHelper)
