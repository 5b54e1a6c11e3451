"""A copy of a classifier whose output is a matrix in place of the list of maps that a `ZipMap` makes of it.

Converters of scikit-learn and LightGBM end a classifier with one by default; bundles hold tensors only.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.atomic import write_bytes_atomic
from ortprep.bundle.file_links import refuse_links
from ortprep.children.child import run_child
from ortprep.runtime.machine.memory import available_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx

COPIES_FOLDER = "models"
_ML_DOMAIN = "ai.onnx.ml"
_IDENTITY_OPSET = 8
_MAX_CLASSES = 8
TIMEOUT_S = 600.0
"""Timeout of what `init` does in a child process, in seconds."""


def copy_path(model: Path, folder: Path) -> Path:
    """Returns where the copy of a model belongs, given the folder of its spec; models of one name differ."""
    place = os.path.relpath(model.absolute(), folder.absolute())
    digest = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()
    return folder / COPIES_FOLDER / f"{model.stem}-{digest[:8]}.onnx"


def write_tensor_copy(model: Path, folder: Path) -> tuple[str, ...]:
    """Writes the copy of a model in a child process, if it has a `ZipMap`.

    Returns:
        What became of each output, in a line; none if there was nothing to change, and no copy.
    """
    paths = model.absolute(), copy_path(model, folder).absolute()
    return run_child(copy_as_tensors, paths, timeout_s=TIMEOUT_S, memory_bytes=available_bytes()).value


def refresh_tensor_copy(model: Path, folder: Path) -> None:
    """Writes the copy of a model again if the model is newer; removes it if it would be no different."""
    copy = copy_path(model, folder)
    is_old = copy.is_file() and model.is_file() and copy.stat().st_mtime_ns < model.stat().st_mtime_ns
    if is_old and not write_tensor_copy(model, folder):
        copy.unlink()


def copy_as_tensors(paths: tuple[Path, Path]) -> tuple[str, ...]:
    """Child function of `write_tensor_copy`: the model, and its copy.

    Raises:
        SpecError: The copy's folder is a link.
    """
    import onnx

    source, copy = paths
    refuse_links([copy.parent])
    model = onnx.load(source)
    outputs = {output.name: output for output in model.graph.output}
    changes = tuple(filter(None, [_replace_zip_map(node, outputs) for node in model.graph.node]))
    if changes:
        if all(one.domain not in ("", "ai.onnx") for one in model.opset_import):
            model.opset_import.append(onnx.helper.make_opsetid("", _IDENTITY_OPSET))
        write_bytes_atomic(copy, model.SerializeToString(deterministic=True))
    return changes


def _replace_zip_map(node: onnx.NodeProto, outputs: Mapping[str, onnx.ValueInfoProto]) -> str | None:
    """Lets a `ZipMap` that makes an output pass its matrix on; returns what it changed, None for others."""
    if node.op_type != "ZipMap" or node.domain != _ML_DOMAIN:
        return None
    output = outputs.get(node.output[0])
    if output is None:
        return None
    import onnx

    labels = [str(label) for one in node.attribute for label in (*one.ints, *_texts(one))]
    del node.attribute[:]
    node.op_type, node.domain = "Identity", ""
    output.CopyFrom(
        onnx.helper.make_tensor_value_info(output.name, onnx.TensorProto.FLOAT, [None, len(labels)])
    )
    shown = ", ".join([*labels[:_MAX_CLASSES], *(["…"] if len(labels) > _MAX_CLASSES else [])])
    return f"output {output.name!r} is a matrix with a column per class ({shown}), not a list of maps"


def _texts(attribute: onnx.AttributeProto) -> list[str]:
    return [one.decode("utf-8", "replace") for one in attribute.strings]
