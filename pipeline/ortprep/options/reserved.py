"""Options that users and bundles do not set: ortprep decides them, or they reach beyond a session.

ONNX Runtime can write files, read others than the bundle's and call addresses by them.
"""

from __future__ import annotations

from ortprep.options.option import reserved
from ortprep.options.session import DATA_FILE, DATA_MIN_BYTES

_LAYOUT = "the optimize stage decides the files of a prepared model"
_FILE = "a session that jobs load reads the bundle's own files and writes none"
_PROFILE = "a measured or served session is never profiled"

RESERVED_CONFIG = (
    *reserved(
        _LAYOUT,
        DATA_FILE,
        DATA_MIN_BYTES,
        "ep.context_embed_mode",
        "ep.context_enable",
        "ep.context_file_path",
        "ep.context_model_external_initializers_file_name",
        "ep.context_node_name_prefix",
        "ep.context_source_model_path",
        "ep.enable_weightless",
        "ep.enable_weightless_ep_context_nodes",
        "ep.enable_weightless_mode",
        "session.load_model_format",
        "session.optimized_model_filepath",
        "session.save_external_prepacked_constant_initializers",
        "session.save_model_format",
    ),
    *reserved(
        _FILE,
        "session.collect_node_memory_stats_to_file",
        "session.debug_layout_transformation",
        "session.moe.offload.allow_file_backing",
        "session.moe.offload.derived_cache_dir",
        "session.moe.offload.popularity_file",
        "session.moe.offload.source_root",
        "session.moe_expert_counter_state_file",
        "session.node_partition_config_file",
        "session.resource_cuda_partitioning_settings",
    ),
    *reserved(
        "ortprep loads models by path, where it does nothing or points at memory nobody keeps",
        "session.model_external_initializers_file_folder_path",
        "session.use_external_initializer_file_buffers_directly",
        "session.use_ort_model_bytes_directly",
    ),
    *reserved(
        "Python ignores it; set the attribute of the same name beside session_config",
        "session.enable_cpu_mem_arena",
        "session.enable_mem_pattern",
        "session.enable_profiling",
        "session.execution_mode",
        "session.graph_optimization_level",
        "session.inter_op_num_threads",
        "session.intra_op_num_threads",
        "session.log_id",
        "session.log_severity_level",
        "session.log_verbosity_level",
        "session.use_deterministic_compute",
        "session.use_per_session_threads",
    ),
    *reserved("a session that cannot run serves nobody", "session.compile_only"),
    *reserved("it is for set_ep_dynamic_options of an open session", "ep.dynamic.workload_type"),
)

RESERVED_ATTRIBUTES = (
    *reserved("optimize.level of the spec decides", "graph_optimization_level"),
    *reserved(_LAYOUT, "optimized_model_filepath"),
    *reserved(_PROFILE, "enable_profiling", "profile_file_prefix"),
    *reserved(
        "without global thread pools, which Python cannot make, session creation fails",
        "use_per_session_threads",
    ),
)

RESERVED_CUDA = reserved(
    "addresses of one process mean nothing in a bundle",
    "gpu_external_alloc",
    "gpu_external_empty_cache",
    "gpu_external_free",
    "has_user_compute_stream",
    "user_compute_stream",
)
