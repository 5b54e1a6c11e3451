"""Models with their weights in the file itself; for child processes, since it reads them with onnx."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx.external_data_helper import ExternalDataInfo

from ortprep.stages.core.graphs.graph_walk import values_bytes, walk_tensors


def write_inline(model: Path, written: Path, *, data_folder: Path) -> None:
    """Writes a model with all its weights inside.

    ONNX Runtime leaves weights where they are when it writes a graph whose source has them outside, under the
    name they have beside that source.

    Raises:
        OSError: Data is missing, or the disk is full.
    """
    onnx.save(load_with_weights(model, data_folder), written)


def load_with_weights(path: Path, data_folder: Path) -> onnx.ModelProto:
    """Reads a model with its weights; hard links, which onnx refuses, are what a build shares files by.

    Raises:
        OSError: Data is missing.
    """
    model = onnx.load(path, load_external_data=False)
    for tensor in walk_tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        info = ExternalDataInfo(tensor)
        with (data_folder / info.location).open("rb") as file:
            file.seek(info.offset or 0)
            tensor.raw_data = file.read(info.length or values_bytes(tensor))
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.DEFAULT
    return model
