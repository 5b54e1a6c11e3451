"""What Triton and its ONNX Runtime backend do with a model folder, written down from their sources.

From triton-inference-server: `src/model_config_utils.cc` (what a configuration may be) of core at 73aad7c,
`src/onnxruntime.cc` and `src/onnxruntime_utils.cc` of onnxruntime_backend at 00fd3e8. Configurations are read
with Triton's own protobuf, sessions are real, no server is. Nothing here knows the code that writes them.
"""

import numpy as np
import onnxruntime
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as messages
from tritonclient.utils import triton_to_np_dtype

from ortprep.runtime.tensors.element_types import numpy_dtype

Level = onnxruntime.GraphOptimizationLevel
LEVELS = {-1: Level.ORT_ENABLE_BASIC, 1: Level.ORT_ENABLE_EXTENDED, 2: Level.ORT_DISABLE_ALL}
CUDA_DEFAULTS = {
    "cudnn_conv_algo_search": "EXHAUSTIVE",
    "gpu_mem_limit": str(2**64 - 1),
    "arena_extend_strategy": "kNextPowerOfTwo",
    "do_copy_in_default_stream": "1",
}
CUDA_CODES = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}


def read_config(folder):
    """Parses the configuration, and checks what the server checks of it."""
    config = text_format.Parse((folder / "config.pbtxt").read_text(), messages.ModelConfig())
    assert config.name == folder.name
    assert config.backend == "onnxruntime"
    for tensor in (*config.input, *config.output):
        assert tensor.dims, f"{tensor.name} must specify dims"
        assert all(size >= 1 or size == -1 for size in tensor.dims)
        if tensor.HasField("reshape") and not tensor.reshape.shape:
            assert config.max_batch_size > 0, "empty reshape of a model without batches"
            assert list(tensor.dims) == [1]
    for group in config.instance_group:
        assert group.count >= 1
        assert group.kind in (messages.ModelInstanceGroup.KIND_CPU, messages.ModelInstanceGroup.KIND_GPU)
        assert not group.gpus or group.kind == messages.ModelInstanceGroup.KIND_GPU
    return config


def session_options(config):
    """The options of the session that the backend makes."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS.get(config.optimization.graph.level, Level.ORT_ENABLE_ALL)
    parameters = {key: one.string_value for key, one in config.parameters.items()}
    mode = int(parameters.get("execution_mode", "0"))
    options.execution_mode = (
        onnxruntime.ExecutionMode.ORT_SEQUENTIAL,
        onnxruntime.ExecutionMode.ORT_PARALLEL,
    )[mode]
    options.intra_op_num_threads = max(int(parameters.get("intra_op_thread_count", "0")), 0)
    options.inter_op_num_threads = max(int(parameters.get("inter_op_thread_count", "0")), 0)
    options.enable_cpu_mem_arena = _bool(parameters.get("enable_mem_arena", "1"))
    options.enable_mem_pattern = _bool(parameters.get("enable_mem_pattern", "1"))
    key = "session.use_device_allocator_for_initializers"
    if key in parameters:
        options.add_session_config_entry(key, parameters[key])
    return options


def cuda_options(config):
    """The options the backend gives the CUDA provider, but for device and stream."""
    options = {}
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        assert accelerator.name == "cuda", f"unknown Execution Accelerator {accelerator.name!r} is requested"
        for key, value in accelerator.parameters.items():
            if key in ("do_copy_in_default_stream", "use_ep_level_unified_stream"):
                _bool(value)
            if key and value:
                options[key] = value
    parameters = {key: one.string_value for key, one in config.parameters.items()}
    for key, default in CUDA_DEFAULTS.items():  # set last, whatever the accelerator says
        value = parameters.get(key)
        codes = CUDA_CODES.get(key)
        options[key] = default if value is None else value if codes is None else codes[int(value)]
    return options


def _bool(text):
    assert text.lower() in ("true", "1", "false", "0"), f"not a boolean: {text!r}"
    return text.lower() in ("true", "1")


def load_model(folder):
    """Makes the session of a model on the CPU, and checks its inputs and outputs as the backend does."""
    config = read_config(folder)
    path = folder / "1" / (config.default_model_filename or "model.onnx")
    if path.is_dir():
        path = path / "model.onnx"
    session = onnxruntime.InferenceSession(
        str(path), session_options(config), providers=["CPUExecutionProvider"]
    )
    assert len(session.get_inputs()) == len(config.input)
    for tensor in config.input:
        _compare(tensor, session.get_inputs(), config.max_batch_size, exact=False)
    for tensor in config.output:
        _compare(tensor, session.get_outputs(), config.max_batch_size, exact=True)
    return config, session


def _compare(tensor, values, max_batch_size, *, exact):
    value = next(one for one in values if one.name == tensor.name)
    assert numpy_dtype(_onnx_name(value.type)) == _dtype(tensor.data_type)
    model = [size if isinstance(size, int) else -1 for size in value.shape]
    dims = list(tensor.reshape.shape) if tensor.HasField("reshape") else list(tensor.dims)
    if max_batch_size:
        assert model
        assert model[0] == -1, "for batches the first dimension must be -1"
        dims = [-1, *dims]
    if not model:
        assert all(size == 1 for size in dims), "a scalar has 1 in the configuration"
        return
    assert len(model) == len(dims)
    assert all(m == d for m, d in zip(model, dims, strict=True) if exact or m != -1)


def _onnx_name(type_name):
    return type_name.removeprefix("tensor(").removesuffix(")")


def _dtype(data_type):
    name = messages.DataType.Name(data_type).removeprefix("TYPE_")
    if name == "STRING":
        return numpy_dtype("string")
    return numpy_dtype("bfloat16") if name == "BF16" else np.dtype(triton_to_np_dtype(name))


def answer(folder, feeds):
    """Loads a model folder and runs it once; returns the outputs by name."""
    from ortprep.runtime.tensors.arrays import run_session

    return run_session(load_model(folder)[1], feeds)
