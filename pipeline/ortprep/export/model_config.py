"""`config.pbtxt`, built of Triton's own messages and read back with them."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortprep.bundle.loader_config import LoaderConfig, TensorSpec, Variant
from ortprep.errors import ExportError
from ortprep.export.options import ACCELERATOR, GPUS, GRAPH, PARAMETERS, MappedOptions
from ortprep.export.placement import TrialResult
from ortprep.export.variant_selection import ExportRequest
from ortprep.runtime.loading.session import CUDA
from ortprep.runtime.tensors.element_types import BFLOAT16, Array

BACKEND = "onnxruntime"
TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "string": "TYPE_STRING",
    "bfloat16": "TYPE_BF16",
}
"""Triton's data types that the backend takes, by ONNX element type."""

_MAX_WARM_UP_BYTES = 64 * 2**20

Interface = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
"""Inputs and outputs."""


def import_messages() -> Any:
    """Returns the module with Triton's messages."""
    importlib.import_module("google.protobuf.text_format")
    return importlib.import_module("tritonclient.grpc.model_config_pb2")


def build_config(
    name: str, model_file: str, interface: Interface, options: MappedOptions, request: ExportRequest
) -> Any:
    """Returns the `inference.ModelConfig` of a model, without a warm-up.

    Args:
        name: The model's name, which is that of its folder.
        model_file: Name of the model's file, or of the folder around its files.
        interface: Inputs and outputs, as the session has them.
        options: The options that remain.
        request: The instances and the largest batch.

    Raises:
        ExportError: Triton has no type, rank or size of an input or output.
    """
    messages = import_messages()
    config = messages.ModelConfig(
        name=name,
        backend=BACKEND,
        max_batch_size=request.max_batch_size,
        default_model_filename=model_file,
    )
    for specs, tensors in zip(interface, (config.input, config.output), strict=True):
        for spec in specs:
            describe_tensor(tensors.add(), spec, batched=request.max_batch_size > 0)
    group = config.instance_group.add(count=request.instances, kind=messages.ModelInstanceGroup.KIND_CPU)
    if options.providers[0].name == CUDA:
        group.kind = messages.ModelInstanceGroup.KIND_GPU
        group.gpus.extend(map(int, options.section(GPUS).values()))
    if request.max_batch_size > 1:
        config.dynamic_batching.SetInParent()
    config.optimization.graph.level = int(options.section(GRAPH).get("level", "0"))
    for key, value in options.section(PARAMETERS).items():
        config.parameters[key].string_value = value
    if cuda := options.section(ACCELERATOR):
        accelerators = config.optimization.execution_accelerators
        accelerators.gpu_execution_accelerator.add(name="cuda", parameters=dict(cuda))
    return config


def format_config(config: Any) -> str:
    """Returns the text of `config.pbtxt`, after Triton's own parser gave the same message for it."""
    text_format = importlib.import_module("google.protobuf.text_format")
    text = str(text_format.MessageToString(config))
    if text_format.Parse(text, type(config)()) != config:
        raise ExportError(f"config.pbtxt of {config.name!r} does not read back as it was written\n{text}")
    return text


def describe_tensor(message: Any, spec: TensorSpec, *, batched: bool) -> None:
    """Fills in the message of an input or output; its sizes are without the batch, -1 for what varies.

    A scalar of a model without batches has the dims [1] and no reshape, which the server would refuse.

    Raises:
        ExportError: Triton has no such type, rank or size.
    """
    if spec.dtype not in TYPES:
        raise _unfit(spec, f"a tensor of {', '.join(TYPES)}", spec.dtype)
    if spec.shape is None:
        raise _unfit(spec, "a known number of axes", "none")
    sizes = [size if isinstance(size, int) else -1 for size in spec.shape]
    if batched:
        if not sizes or sizes[0] != -1:
            raise _unfit(spec, "a first axis of any size, for --max-batch-size", f"sizes {sizes}")
        del sizes[0]
    if any(size < 1 and size != -1 for size in sizes):
        raise _unfit(spec, "sizes of 1 and more", f"{sizes}")
    message.name = spec.name
    message.data_type = import_messages().DataType.Value(TYPES[spec.dtype])
    message.dims.extend(sizes or [1])
    if batched and not sizes:
        message.reshape.SetInParent()


def _unfit(spec: TensorSpec, expected: str, got: str) -> ExportError:
    return ExportError(f"Triton cannot serve tensor {spec.name!r}\n  expected {expected}, got {got}")


def add_warm_up(config: Any, feeds: Mapping[str, Array]) -> dict[str, bytes] | str:
    """Adds the request that every instance runs before it serves, made of a golden sample.

    With batches, the sample's first row is repeated as often as it has rows, since Triton builds a batch of
    equal requests.

    Args:
        config: The model configuration, with inputs.
        feeds: The sample's arrays by input, as the session takes them.

    Returns:
        The content of each file of the folder `warmup`, or why the sample makes no warm-up.
    """
    batched = config.max_batch_size > 0
    if absent := [one.name for one in config.input if one.name not in feeds]:
        return f"the golden sample has no {', '.join(absent)}"
    arrays = [feeds[one.name] for one in config.input]
    if any(array.size == 0 for array in arrays):
        return "an input of the golden sample is empty, which Triton's warm-up does not take"
    rows = {len(array) for array in arrays} if batched else {1}
    if len(rows) != 1:
        return "the inputs of the golden sample are not of one batch size"
    if sum(array.nbytes for array in arrays) > _MAX_WARM_UP_BYTES:
        return f"the golden sample has more than {_MAX_WARM_UP_BYTES} bytes"
    size = min(rows.pop(), max(config.max_batch_size, 1))
    warm_up = config.model_warmup.add(name="golden", batch_size=size, count=1)
    files = {}
    for number, (tensor, array) in enumerate(zip(config.input, arrays, strict=True)):
        row = array[0] if batched else array
        entry = warm_up.inputs[tensor.name]
        entry.data_type = tensor.data_type
        entry.dims.extend(row.shape or (1,))
        entry.input_data_file = f"input-{number}"
        files[entry.input_data_file] = encode_tensor(row)
    return files


def encode_tensor(array: Array) -> bytes:
    """Returns an array as Triton reads it from a file: elements in row-major order, little-endian.

    A string is its length in four bytes and then its UTF-8.
    """
    array = np.asarray(array)
    if array.dtype.kind in "UO":
        encoded = bytearray()
        for item in array.flat:
            text = str(item).encode()
            encoded += struct.pack("<I", len(text)) + text
        return bytes(encoded)
    bits = array["bfloat16"] if array.dtype == BFLOAT16 else array
    return bits.astype(bits.dtype.newbyteorder("<"), copy=False).tobytes("C")


def resolve_interface(
    config: LoaderConfig, variant: Variant, trial: TrialResult, golden: Mapping[str, Sequence[int]]
) -> Interface:
    """Returns inputs and outputs; a server compares them with those of the session it makes.

    Args:
        config: The bundle's loader config, which lists those of the source.
        variant: The exported variant.
        trial: Description by its session, if there was one.
        golden: The golden sample's shapes by input and output name. ONNX Runtime's Python lists a tensor of
            unknown rank as it lists a scalar; the sample tells them apart.
    """
    if trial.missing:
        sizes = variant.binding
        inputs, outputs = (
            tuple(one.bound_to(sizes) for one in each) for each in (config.inputs, config.outputs)
        )
        return inputs, outputs

    def correct(spec: TensorSpec) -> TensorSpec:
        is_scalar = spec.shape != () or tuple(golden.get(spec.name, ())) == ()
        return spec if is_scalar else spec._replace(shape=None)

    return tuple(map(correct, trial.inputs)), tuple(map(correct, trial.outputs))
