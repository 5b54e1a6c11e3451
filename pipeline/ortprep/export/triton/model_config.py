"""`config.pbtxt`, built of Triton's own messages and read back with them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortprep.errors import ExportError, MissingExtraError
from ortprep.export.triton.settings import TritonSettings
from ortprep.export.triton.tensors import TritonTensor, WarmUp
from ortprep.versions import install_command

BACKEND = "onnxruntime"


@dataclass(frozen=True)
class TritonModel:
    """All that a model configuration says; tensors are without the batch."""

    name: str
    model_file: str
    max_batch_size: int
    instances: int
    inputs: Sequence[TritonTensor]
    outputs: Sequence[TritonTensor]
    settings: TritonSettings
    warm_up: WarmUp | None


def require_messages() -> None:
    """Raises early where no configuration could be written."""
    _import_messages()


def format_config(model: TritonModel) -> str:
    """Returns the text of `config.pbtxt`, after Triton's own parser gave the same message for it."""
    messages, text_format = _import_messages()
    config = _build(model, messages)
    text = str(text_format.MessageToString(config))
    if parse_config(text) != config:
        raise ExportError(f"config.pbtxt of {model.name!r} does not read back as it was written\n{text}")
    return text


def parse_config(text: str) -> Any:
    """Returns the `inference.ModelConfig` of a `config.pbtxt`."""
    messages, text_format = _import_messages()
    try:
        return text_format.Parse(text, messages.ModelConfig())
    except text_format.ParseError as error:
        raise ExportError(f"not a Triton model configuration\n  {error}") from error


def _import_messages() -> tuple[Any, Any]:
    try:
        messages = importlib.import_module("tritonclient.grpc.model_config_pb2")
        return messages, importlib.import_module("google.protobuf.text_format")
    except ImportError as error:
        raise MissingExtraError(
            f"an export for Triton needs Triton's protobuf messages\n  {error}",
            hint=install_command("triton"),
        ) from error


def _build(model: TritonModel, messages: Any) -> Any:
    config = messages.ModelConfig(
        name=model.name,
        backend=BACKEND,
        max_batch_size=model.max_batch_size,
        default_model_filename=model.model_file,
    )
    for tensor in model.inputs:
        _describe(config.input.add(), tensor, messages, batched=model.max_batch_size > 0)
    for tensor in model.outputs:
        _describe(config.output.add(), tensor, messages, batched=model.max_batch_size > 0)
    settings = model.settings
    kinds = messages.ModelInstanceGroup
    config.instance_group.add(
        count=model.instances,
        kind=kinds.KIND_GPU if settings.on_gpu else kinds.KIND_CPU,
        gpus=settings.gpus if settings.on_gpu else (),
    )
    if model.max_batch_size > 1:
        config.dynamic_batching.SetInParent()
    config.optimization.graph.level = settings.level
    for key, value in settings.parameters.items():
        config.parameters[key].string_value = value
    if settings.cuda:
        accelerators = config.optimization.execution_accelerators
        accelerators.gpu_execution_accelerator.add(name="cuda", parameters=dict(settings.cuda))
    if model.warm_up is not None:
        _warm_up(config.model_warmup.add(), model.warm_up, messages)
    return config


def _describe(message: Any, tensor: TritonTensor, messages: Any, *, batched: bool) -> None:
    message.name = tensor.name
    message.data_type = messages.DataType.Value(tensor.data_type)
    message.dims.extend(tensor.dims)
    if tensor.scalar and batched:
        message.reshape.SetInParent()


def _warm_up(message: Any, warm_up: WarmUp, messages: Any) -> None:
    message.name, message.batch_size, message.count = "golden", warm_up.batch_size, 1
    for one in warm_up.inputs:
        entry = message.inputs[one.name]
        entry.data_type = messages.DataType.Value(one.data_type)
        entry.dims.extend(one.dims)
        entry.input_data_file = one.file
