"""ONNX Runtime's symbolic shape inference, kept from copying the weights of a model.

It adds what it finds to a copy of the model, and the optimizer infers again and again. For child processes:
the class is changed for as long as they last.
"""

from __future__ import annotations

from typing import Any

import onnx

from ortprep.stages.core.graphs.graph_walk import values_bytes

_COPIED_BYTES = 1024


def infer_without_copies(inference: Any) -> None:
    """Patches a shape inference class to copy graphs without their large weights."""
    prepare = inference._preprocess

    def prepare_sharing(self: Any, model: onnx.ModelProto) -> None:
        prepare(self, _without_large_weights(model))
        self.initializers_ = {weight.name: weight for weight in model.graph.initializer}

    inference._preprocess = prepare_sharing


def _without_large_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = onnx.GraphProto(name=model.graph.name)
    for field in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(graph, field).extend(getattr(model.graph, field))
    for weight in model.graph.initializer:
        copied = graph.initializer.add(name=weight.name, data_type=weight.data_type, dims=weight.dims)
        if values_bytes(weight) < _COPIED_BYTES:
            copied.CopyFrom(weight)
    skeleton = onnx.ModelProto(ir_version=model.ir_version, graph=graph, functions=model.functions)
    skeleton.opset_import.extend(model.opset_import)
    return skeleton
