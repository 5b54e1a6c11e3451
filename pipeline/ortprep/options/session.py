"""Session config entries about loading, memory, threads and diagnosis."""

from __future__ import annotations

from pathlib import Path

from ortprep.options.moe import MOE
from ortprep.options.option import Option, integer, switch

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

DATA_FILE = "session.optimized_model_external_initializers_file_name"
DATA_MIN_BYTES = "session.optimized_model_external_initializers_min_size_in_bytes"
_AFFINITY = r"[1-9][0-9]{0,3}([,-][1-9][0-9]{0,3})*"  # ONNX Runtime writes out each number of a range


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
        "session.enable_saved_runtime_optimizations",
        "0",
        "Applies optimisations that were saved in an .ort model for minimal builds.",
        since="1.30",
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
    integer(
        f"session.external_data_loader.{name}",
        "built in",
        effect,
        since="1.32",
        minimum=minimum,
        multiple=multiple,
        maximum=maximum,
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
        integer(
            f"session.{scope}.spin_duration_us",
            "counted in iterations, not in time",
            f"Microseconds idle {scope} threads spin; 500 to 2000 is usual, more costs power.",
            since="1.26",
        ),
        integer(
            f"session.{scope}.spin_backoff_max",
            "1: no backing off",
            f"Longest pause, in doubling steps, between looks for work of spinning {scope} threads.",
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
    integer(
        "session.dynamic_block_base",
        "0",
        "Cuts parallel work into shrinking blocks, the first of them 1/(threads · this) of the whole; "
        "4 evens out latency in some models, 0 is off.",
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
    switch(
        "session.strict_shape_type_inference",
        "0",
        "Makes contradictions in shape and type inference errors instead of warnings.",
    ),
)

SESSION_CONFIG = (*_LOADING, *_EXTERNAL_DATA_LOADER, *_THREADS, *_DIAGNOSIS, *MOE)


def with_external_data(model: Path) -> dict[str, str]:
    """Returns the session entries that write large weights into a file beside the written model."""
    # A name, not a path: it is taken as relative to the written model, and stands so in it.
    return {DATA_FILE: f"{model.name}.data", DATA_MIN_BYTES: str(MIN_EXTERNAL_BYTES)}
