"""Session config entries about loading, memory, threads and diagnosis."""

from __future__ import annotations

from pathlib import Path

from ortprep.options.moe import MOE
from ortprep.options.option import HEADER, NEWEST_WHEEL, Option, switch

MIN_EXTERNAL_BYTES = 16 * 1024
"""Weights from this size on are written to the data file, which is mapped; smaller ones stay in the model.

Each external weight costs an open and a map at load, each inline one a copy. Measured on convolution nets of
5 to 100 MB: 1 KiB to 64 KiB are alike within the noise, 256 KiB is slower and takes more memory. Zero is no
choice at all: shape inference cannot read an external constant, so a graph whose `Reshape` shape is outside
does not load. ONNX Runtime maps them from any offset; the optimize stage moves them to multiples of
`PAGE_BYTES`, for readers that need those.
"""

PAGE_BYTES = 4096
"""Offsets of weights in a data file are multiples of it, so that they can be read directly (`O_DIRECT`,
GPUDirect Storage); ONNX Runtime 1.32 reads in pieces that are multiples of it, too."""

_DATA_FILE = "session.optimized_model_external_initializers_file_name"
_DATA_MIN_BYTES = "session.optimized_model_external_initializers_min_size_in_bytes"
_INT_MAX = 2**31 - 1
_SIZE_MAX = 2**63 - 1
_FROM_PATH = "the pipeline loads models by path, where it does nothing or points at memory nobody keeps"
_NO_FILES = "a session that jobs load reads the bundle's own files and writes none"
_LAYOUT = "the optimize stage decides the files of a prepared model"
_AFFINITY = r"[1-9][0-9]{0,3}([,-][1-9][0-9]{0,3})*"  # ONNX Runtime writes out each number of a range


def _by_attribute(attribute: str, instead: str) -> Option:
    return Option(
        f"session.{attribute}",
        "text",
        default="the attribute of SessionOptions",
        effect=f"Sets {attribute} through the C interface; Python keeps the entry and does nothing with it.",
        since="1.28",
        owner=f"Python ignores it; {instead}",
    )


_LOADING = (
    switch(
        "session.disable_prepacking",
        "0",
        "Leaves weights as they are stored instead of rearranging copies for the CPU's kernels: loading is "
        "faster and mapped weights stay shared, matrix products can be slower.",
    ),
    switch(
        "session.prepack.enable_parallel",
        "0",
        "Rearranges weights on all intra-op threads at once: a faster load with a higher peak of memory.",
        since="1.31",
    ),
    switch(
        "session.save_external_prepacked_constant_initializers",
        "0",
        "Writes rearranged weights into the external data of an optimised model, for later sessions to map.",
        owner=_LAYOUT,
    ),
    switch(
        "session.use_device_allocator_for_initializers",
        "0",
        "Allocates weights straight from the device instead of the arena, so that the arena does not grow "
        "by doubling around them.",
    ),
    switch(
        "session.use_env_allocators",
        "0",
        "Uses allocators registered with the environment, which sessions of one process then share.",
    ),
    switch(
        "session.use_memory_mapped_ort_model",
        "0",
        "Maps an .ort file instead of reading it; without "
        "session.use_ort_model_bytes_for_initializers the weights are still copied.",
        since="1.26",
    ),
    switch(
        "session.use_ort_model_bytes_for_initializers",
        "0",
        "Lets weights of an .ort model stay where the file was mapped or read instead of copying them.",
    ),
    switch(
        "session.use_ort_model_bytes_directly",
        "0",
        "Uses the caller's buffer of an .ort model without copying it.",
        owner=_FROM_PATH,
    ),
    switch(
        "session.use_external_initializer_file_buffers_directly",
        "0",
        "Borrows the buffers given for external data files instead of copying weights out of them.",
        since="1.31",
        owner=_FROM_PATH,
    ),
    Option(
        "session.model_external_initializers_file_folder_path",
        "text",
        default="the model's folder",
        effect="Folder of the external data of a model that is given as bytes.",
        owner=_FROM_PATH,
    ),
    Option(
        "session.load_model_format",
        "choice",
        default="by file name and content",
        effect="Says whether the model is in ONNX or ORT format.",
        values=("ONNX", "ORT"),
        owner=_LAYOUT,
    ),
    Option(
        "session.save_model_format",
        "choice",
        default="by file name",
        effect="Format an optimised model is written in.",
        values=("ONNX", "ORT"),
        owner=_LAYOUT,
    ),
    Option(
        _DATA_FILE,
        "text",
        default="empty: weights go into the model file",
        effect="External data file of an optimised model that is written, relative to it.",
        owner=_LAYOUT,
    ),
    Option(
        _DATA_MIN_BYTES,
        "integer",
        default="1024",
        effect="Smallest weight that goes to that file.",
        minimum=0,
        maximum=_SIZE_MAX,
        owner=_LAYOUT,
    ),
    switch(
        "session.enable_saved_runtime_optimizations",
        "0",
        "Applies optimisations that were saved in an .ort model for minimal builds.",
        since="1.30",
    ),
    switch(
        "session.compile_only",
        "0",
        "Makes a session that compiles for its providers and cannot run.",
        since="1.27",
        owner="a session that cannot run serves nobody",
    ),
    switch(
        "session.disable_model_compile",
        "0",
        "Fails if a provider would compile at load instead of finding its compiled context in the model.",
    ),
    switch(
        "session.fail_on_suboptimal_compiled_model",
        "0",
        "Fails if a compiled context in the model is usable but should be compiled again.",
    ),
    switch(
        "session.disable_cpu_ep_fallback",
        "0",
        "Fails if a node would run on CPU; also fails wherever the CPU provider is asked for by name.",
    ),
    switch(
        "session.allow_released_opsets_only",
        "1",
        "Is meant to refuse models of unreleased opsets; the environment's ALLOW_RELEASED_ONNX_OPSET_ONLY "
        "decides whatever is set here (measured on 1.31.1).",
    ),
)

_EXTERNAL_DATA_LOADER = tuple(
    Option(
        f"session.external_data_loader.{name}",
        "integer",
        default="built in",
        effect=effect,
        since="1.32",
        minimum=minimum,
        maximum=maximum,
        multiple=multiple,
        source=NEWEST_WHEEL,
    )
    for name, minimum, maximum, multiple, effect in (
        (
            "threads",
            0,
            64,
            None,
            "Threads that read external data for a provider that loads weights itself, unlike the CPU's.",
        ),
        (
            "chunk_bytes",
            4096,
            64 * 1024 * 1024,
            4096,
            "How much of external data such a thread reads at a time.",
        ),
        (
            "pinned_memory_bytes",
            1024 * 1024,
            1024 * 1024 * 1024,
            8192,
            "Page-locked memory that external data passes through on its way to a device.",
        ),
        (
            "min_size_bytes",
            0,
            2**32,
            None,
            "Smallest weight that is loaded in this way; smaller ones are read as without a loader.",
        ),
    )
)
"""Read by ONNX Runtime's core for execution providers that load external data themselves (plugins, CUDA)."""


def _spinning(scope: str) -> tuple[Option, ...]:
    return (
        switch(
            f"session.{scope}.allow_spinning",
            "1",
            f"Lets idle {scope} threads spin for a while before they sleep: less latency, more CPU; 0 suits "
            "many processes on one node.",
        ),
        Option(
            f"session.{scope}.spin_duration_us",
            "integer",
            default="counted in iterations, not in time",
            effect=f"Microseconds idle {scope} threads spin; 500 to 2000 is usual, more costs power.",
            since="1.26",
            minimum=0,
            maximum=_INT_MAX,
        ),
        Option(
            f"session.{scope}.spin_backoff_max",
            "integer",
            default="1: no backing off",
            effect=f"Longest pause, in doubling steps, between looks for work of spinning {scope} threads.",
            since="1.26",
            minimum=1,
            maximum=64,
        ),
    )


_THREADS = (
    *_spinning("intra_op"),
    *_spinning("inter_op"),
    switch(
        "session.force_spinning_stop", "0", "Stops all spinning as soon as the last concurrent run returns."
    ),
    Option(
        "session.dynamic_block_base",
        "integer",
        default="0",
        effect="Cuts parallel work into shrinking blocks, the first of them 1/(threads · this) of the whole; "
        "4 evens out latency in some models, 0 is off.",
        minimum=0,
        maximum=_INT_MAX,
    ),
    Option(
        "session.intra_op_thread_affinities",
        "text",
        default="one physical core each, if the number of threads is not set",
        effect="Processors of each intra-op thread but the calling one, so one group fewer than "
        "intra_op_num_threads; session creation fails on any other number of groups.",
        pattern=rf"{_AFFINITY}(;{_AFFINITY})*",
        form="groups of processors counted from 1, as in 1,2;3-4",
    ),
    switch(
        "session.set_denormal_as_zero",
        "0",
        "Treats denormal floats as zero in the session's threads: faster where they occur, less exact.",
    ),
)

_DIAGNOSIS = (
    switch(
        "session.record_ep_graph_assignment_info",
        "0",
        "Remembers which node runs on which provider, for get_provider_graph_assignment_info().",
        since="1.24",
    ),
    Option(
        "session.collect_node_memory_stats_to_file",
        "text",
        default="none",
        effect="CSV file that the memory use of every node is written to; needs enable_mem_pattern off.",
        owner=_NO_FILES,
    ),
    switch(
        "session.debug_layout_transformation",
        "0",
        "Writes the graph into the working directory after each step of a layout transformation.",
        owner=_NO_FILES,
    ),
    switch(
        "session.strict_shape_type_inference",
        "0",
        "Makes contradictions in shape and type inference errors instead of warnings.",
    ),
)

_ATTRIBUTES = (
    _by_attribute("intra_op_num_threads", "set intra_op_num_threads beside session_config"),
    _by_attribute("inter_op_num_threads", "set inter_op_num_threads beside session_config"),
    _by_attribute("graph_optimization_level", "optimize.level of the spec decides"),
    _by_attribute("optimized_model_filepath", _LAYOUT),
    *(
        _by_attribute(name, f"it is the attribute {name} of SessionOptions")
        for name in (
            "enable_cpu_mem_arena",
            "enable_mem_pattern",
            "enable_profiling",
            "execution_mode",
            "log_id",
            "log_severity_level",
            "log_verbosity_level",
            "use_deterministic_compute",
            "use_per_session_threads",
        )
    ),
    Option(
        "ep.dynamic.workload_type",
        "choice",
        default="Default",
        effect="Priority of a session's work in the eyes of the operating system.",
        values=("Default", "Efficient"),
        owner="it is for set_ep_dynamic_options of a session that stands, not for session creation",
        source=HEADER,
    ),
)

SESSION_CONFIG = (*_LOADING, *_EXTERNAL_DATA_LOADER, *_THREADS, *_DIAGNOSIS, *MOE, *_ATTRIBUTES)


def with_external_data(model: Path) -> dict[str, str]:
    """Returns the session entries that write large weights into a file beside the written model."""
    # A name, not a path: it is taken as relative to the written model, and stands so in it.
    return {_DATA_FILE: f"{model.name}.data", _DATA_MIN_BYTES: str(MIN_EXTERNAL_BYTES)}
