"""All weights of a model moved to one external data file, a piece at a time; for child processes.

`onnx.save` wants all of a model in memory before it writes the first byte. Here a graph that refers to its
weights is enough: they go from file to file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from pipeline.stages.convert.weights import EXTERNAL_BYTES, WeightReader, WeightWriter, keep_inside
from pipeline.stages.graphs.graph_walk import values_bytes, walk_graphs, walk_nodes


class WeightsFile(WeightWriter):
    """A writer that is told the data file instead of the model.

    Args:
        path: The new file, with the model's name and `.data`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path.with_name(path.name.removesuffix(".data")))


def move_weights(model: onnx.ModelProto, folder: Path, weights: WeightWriter) -> None:
    """Puts every large initializer into a file, and takes every other external tensor inside.

    Args:
        model: The model; changed in place.
        folder: Folder that its external data is in.
        weights: Where they go.

    Raises:
        StageError: Data is missing, or of another size than its tensor.
        OSError: The disk is full.
    """
    reader = WeightReader(folder)
    for graph in walk_graphs(model):
        for tensor in graph.initializer:
            if values_bytes(tensor) >= EXTERNAL_BYTES or tensor.data_location == TensorProto.EXTERNAL:
                weights.write(tensor, reader.pieces(tensor))
        for sparse in graph.sparse_initializer:
            _take_inside(sparse.values, reader)
            _take_inside(sparse.indices, reader)
    for node in walk_nodes(model):
        for attribute in node.attribute:
            for tensor in (attribute.t, *attribute.tensors):
                _take_inside(tensor, reader)


def _take_inside(tensor: TensorProto, reader: WeightReader) -> None:
    if tensor.data_location == TensorProto.EXTERNAL:
        keep_inside(tensor, reader.read(tensor))


def read_array(tensor: TensorProto, reader: WeightReader) -> NDArray[np.generic]:
    """Returns the values of a tensor whose type numpy has, wherever they are.

    Raises:
        StageError: Data is missing, or of another size than its tensor.
    """
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    array: NDArray[np.generic] = np.frombuffer(reader.read(tensor), dtype).reshape(tuple(tensor.dims))
    return array


def write_array(name: str, array: NDArray[np.generic], weights: WeightWriter) -> TensorProto:
    """Returns a tensor of these values, outside if they are large enough for that."""
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
    weights.write(tensor, (array.tobytes(),))
    return tensor
