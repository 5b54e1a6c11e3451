"""`config.pbtxt`, built of Triton's own messages and read back with them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ortprep.bundle.loader_config import TensorSpec
from ortprep.errors import ExportError
from ortprep.export.options import ACCELERATOR, GPUS, GRAPH, PARAMETERS, MappedOptions
from ortprep.export.placement import Interface
from ortprep.runtime.loading.session import CUDA

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


def import_messages() -> Any:
    """Returns the module with Triton's messages."""
    importlib.import_module("google.protobuf.text_format")
    return importlib.import_module("tritonclient.grpc.model_config_pb2")


def build_config(
    name: str,
    model_file: str,
    interface: Interface,
    options: MappedOptions,
    *,
    instances: int = 1,
    max_batch_size: int = 0,
) -> Any:
    """Returns the `inference.ModelConfig` of a model.

    Args:
        name: The model's name, which is that of its folder.
        model_file: Name of the model's file, or of the folder around its files.
        interface: Inputs and outputs, as the session has them.
        options: The options that remain.
        instances: Number of instances on the processor, or on each GPU.
        max_batch_size: Largest batch that Triton may form; 0 leaves requests as they are.

    Raises:
        ExportError: Triton has no type, rank or size of an input or output.
    """
    messages = import_messages()
    config = messages.ModelConfig(
        name=name,
        backend=BACKEND,
        max_batch_size=max_batch_size,
        default_model_filename=model_file,
    )
    for specs, tensors in zip(interface, (config.input, config.output), strict=True):
        for spec in specs:
            describe_tensor(tensors.add(), spec, batched=max_batch_size > 0)
    group = config.instance_group.add(count=instances, kind=messages.ModelInstanceGroup.KIND_CPU)
    if options.providers[0].name == CUDA:
        group.kind = messages.ModelInstanceGroup.KIND_GPU
        group.gpus.extend(map(int, options.section(GPUS).values()))
    if max_batch_size > 1:
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


def correct_ranks(interface: Interface, golden: Mapping[str, Sequence[int]]) -> Interface:
    """Returns inputs and outputs, those of unknown rank as such; a server compares them with its session's.

    Args:
        interface: Inputs and outputs. ONNX Runtime's Python lists a tensor of unknown rank as a scalar.
        golden: The golden sample's shapes by input and output name, which tell the two apart.
    """

    def correct(spec: TensorSpec) -> TensorSpec:
        is_scalar = spec.shape != () or tuple(golden.get(spec.name, ())) == ()
        return spec if is_scalar else spec._replace(shape=None)

    inputs, outputs = interface
    return tuple(map(correct, inputs)), tuple(map(correct, outputs))
