"""What an application requests of a session, and whether a bundle can give it: all of it, or nothing.

A bundle's graph was optimised once, with ONNX Runtime's own settings. So it cannot stand for the source
where the application steers the optimisation itself, or has parts of the graph replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ortprep.runtime.loading.caller_options import find_graph_calls, read_entries
from ortprep.runtime.loading.session import CPU, CUDA, MODEL_CONFIG_VARIABLE

if TYPE_CHECKING:
    from ortprep.bundle.session_record import SessionPlan

_DEFAULT_LEVEL = "ORT_ENABLE_ALL"
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")  # a driver's, WSL's, Jetson's

_GRAPH_ENTRIES = (
    "ep.context_enable",
    "optimization.constant_folding_max_output_size_in_bytes",
    "optimization.disable_specified_optimizers",
    "optimization.enable_cast_chain_elimination",
    "optimization.enable_gelu_approximation",
    "optimization.minimal_build_optimizations",
    "session.disable_aot_function_inlining",
    "session.disable_double_qdq_remover",
    "session.disable_qdq_constant_folding",
    "session.disable_quant_qdq",
    "session.enable_dq_matmulnbits_fusion",
    "session.enable_quant_qdq_cleanup",
    "session.graph_optimizations_loop_level",
    "session.layer_assignment_settings",
    "session.load_model_format",
    "session.model_external_initializers_file_folder_path",
    "session.name_based_layer_assignment",
    "session.node_partition_config_file",
    "session.qdq_matmulnbits_accuracy_level",
    "session.qdq_matmulnbits_block_size",
    "session.qdqisint8allowed",
    "session.save_model_format",
)
"""Config entries that decide how a source is read and optimised."""


class SessionRequest(NamedTuple):
    """The arguments of `onnxruntime.InferenceSession`.

    Attributes:
        model: Path of the model, or the model itself.
        options: An `onnxruntime.SessionOptions`, or None.
        providers: Execution providers, as names or with options; None for ONNX Runtime's default.
        provider_options: Options of each provider; None if `providers` has them.
        others: Every other keyword argument.
    """

    model: Any
    options: Any
    providers: Any
    provider_options: Any
    others: Mapping[str, Any]


class SessionPlacement(NamedTuple):
    """Where a session runs.

    Attributes:
        target: The target whose variants run there: `cpu` or `cuda`.
        options: What the application set for each execution provider, by its name.
    """

    target: str
    options: Mapping[str, Mapping[str, str]]

    @property
    def device_id(self) -> int | None:
        """The CUDA ordinal that the application named, None for the first."""
        ordinal = self.options.get(CUDA, {}).get("device_id")
        return int(ordinal) if self.target == "cuda" and ordinal is not None and ordinal.isdecimal() else None

    def apply(self, plan: SessionPlan) -> SessionPlan:
        """Returns a plan with the application's provider options, which win over the bundle's."""
        providers = tuple(
            provider._replace(options={**provider.options, **self.options.get(provider.name, {})})
            for provider in plan.providers
        )
        return plan._replace(providers=providers)


def choose_placement(
    request: SessionRequest, onnxruntime: Any, *, has_gpu: Callable[[], bool]
) -> SessionPlacement | None:
    """Returns where a plain session would run; None for execution providers that no bundle is prepared for.

    As in ONNX Runtime, providers that it does not have do not count, CUDA does not without a GPU, the CPU
    always comes last, and no providers at all are those that it has.

    Raises:
        ValueError: The arguments are not what ONNX Runtime takes.
    """
    from onnxruntime.capi.onnxruntime_inference_collection import check_and_normalize_provider_args

    available = onnxruntime.get_available_providers()
    names, options = check_and_normalize_provider_args(request.providers, request.provider_options, available)
    requested = names or [name for name in available if name in (CUDA, CPU)]
    names_here = [name for name in requested if name in available and (name != CUDA or has_gpu())]
    target = {(CPU,): "cpu", (CUDA, CPU): "cuda"}.get(tuple(dict.fromkeys([*names_here, CPU])))
    return None if target is None else SessionPlacement(target, dict(zip(names, options, strict=True)))


def has_gpu() -> bool:
    """Returns whether this process can use a GPU; the driver is used only where there is one."""
    if not any(map(os.path.exists, _GPU_FILES)):
        return False
    from ortprep.runtime.loading.resolved_variant import read_compute_capabilities

    return bool(read_compute_capabilities())


def find_obstacle(request: SessionRequest, onnxruntime: Any) -> str | None:
    """Returns the first thing that an application requests and no bundle can give; None if there is none."""
    others = sorted(request.others.keys() - {"enable_fallback"})
    if others:
        return f"the application passes {others[0]}"
    if os.environ.get(MODEL_CONFIG_VARIABLE) == "1":
        return f"{MODEL_CONFIG_VARIABLE} is set"
    if request.options is None:
        return None
    if not isinstance(request.options, onnxruntime.SessionOptions):
        return "its session options are not ONNX Runtime's"
    return _find_options_obstacle(request.options)


def _find_options_obstacle(options: Any) -> str | None:
    """Returns which session option of an application no bundle can honour, None if all can be."""
    called = find_graph_calls(options)
    if called:
        return f"the application called {called[0]} of its session options"
    level = options.graph_optimization_level.name
    if level != _DEFAULT_LEVEL:
        return f"the application asks for the optimisation level {level}"
    if options.optimized_model_filepath:
        return "the application saves the optimised model"
    if hasattr(options, "has_providers") and options.has_providers():
        return "the application chooses devices in its session options"
    entries = read_entries(options, _GRAPH_ENTRIES)
    return f"the application sets {next(iter(entries))}" if entries else None
