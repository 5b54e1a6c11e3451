"""A classifier that returns a matrix instead of the list of maps that a `ZipMap` makes of it.

Converters of scikit-learn and LightGBM end a classifier with one by default; bundles hold tensors only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.atomic import write_bytes_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx

ZIP_MAP = "ai.onnx.ml.ZipMap"
"""The operator, as `ModelFacts.operators` has it."""

_ML_DOMAIN, _, _ZIP_MAP_TYPE = ZIP_MAP.rpartition(".")
_IDENTITY_OPSET = 8
_MAX_CLASSES = 8


def drop_zip_maps(paths: tuple[Path, Path]) -> tuple[str, ...]:
    """Child function: writes a model whose outputs are matrices instead of lists of maps.

    Args:
        paths: The model, and the file to write, which may be the same. External data stays where it is.

    Returns:
        What became of each such output, in a line; none if there was nothing to change, and nothing written.
    """
    import onnx

    source, written = paths
    model = onnx.load(source, load_external_data=False)
    outputs = {output.name: output for output in model.graph.output}
    changes = tuple(filter(None, [_replace_zip_map(node, outputs) for node in model.graph.node]))
    if changes:
        if all(one.domain not in ("", "ai.onnx") for one in model.opset_import):
            model.opset_import.append(onnx.helper.make_opsetid("", _IDENTITY_OPSET))
        write_bytes_atomic(written, model.SerializeToString(deterministic=True))
    return changes


def _replace_zip_map(node: onnx.NodeProto, outputs: Mapping[str, onnx.ValueInfoProto]) -> str | None:
    """Lets a `ZipMap` that makes an output pass its matrix on; returns what it changed, None for others."""
    if node.op_type != _ZIP_MAP_TYPE or node.domain != _ML_DOMAIN:
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
