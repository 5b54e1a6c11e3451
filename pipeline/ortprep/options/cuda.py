"""Options of the CUDA execution provider; an unknown one makes session creation fail."""

from __future__ import annotations

from ortprep.options.option import Option, integer, switch

CUDA_OPTIONS = (
    integer(
        "device_id",
        "0",
        "Index of the GPU among those the process sees.",
        owner="a bundle is for any GPU of its kind; load(..., device_id=N) picks one",
        maximum=None,
    ),
    integer(
        "gpu_mem_limit",
        "no limit",
        "Bytes the arena may take; kernels, cuDNN and cuBLAS take more beside it.",
        minimum=1,
        maximum=2**64 - 1,
    ),
    Option(
        "arena_extend_strategy",
        "choice",
        default="kNextPowerOfTwo",
        effect="How the arena grows: in doubling steps, which can over-reserve by the size of the weights, "
        "or by what is asked for.",
        values=("kNextPowerOfTwo", "kSameAsRequested"),
    ),
    Option(
        "cudnn_conv_algo_search",
        "choice",
        default="EXHAUSTIVE",
        effect="How a convolution's plan is found when it first runs and whenever its input shape changes: "
        "cuDNN heuristics B (EXHAUSTIVE), the cheaper A (HEURISTIC), or its fallback (DEFAULT, which can "
        "be very slow); only the last shape's plan is kept (#22705).",
        values=("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    ),
    switch(
        "cudnn_conv_use_max_workspace",
        "1",
        "Lets the search for a convolution's plan use as much scratch memory as it likes; made for fp16 on "
        "cuDNN 8.",
    ),
    switch(
        "cudnn_conv1d_pad_to_nc1d",
        "0",
        "Pads the input of a 1-D convolution to [N, C, 1, D] instead of [N, C, D, 1].",
    ),
    switch(
        "do_copy_in_default_stream",
        "1",
        "Copies on the compute stream; 0 uses streams of their own and can race (#4829).",
    ),
    switch(
        "enable_cuda_graph",
        "0",
        "Captures the kernels of a run and replays them; needs all nodes on CUDA, no control flow, fixed "
        "shapes and IO binding to fixed addresses.",
    ),
    switch(
        "enable_skip_layer_norm_strict_mode",
        "0",
        "Makes SkipLayerNormalization sum in float32: more exact, slower.",
    ),
    switch(
        "prefer_nhwc",
        "0",
        "Runs convolutions and their neighbours channels-last, which suits tensor cores; the graph is "
        "transformed at every load.",
    ),
    switch(
        "use_tf32",
        "1",
        "Lets float32 products run in TF32 on Ampere and later; 0 is exact float32 and slower.",
    ),
    switch(
        "fuse_conv_bias",
        "0",
        "Fuses a convolution with its bias by kernels that cuDNN compiles in the first run.",
    ),
    switch(
        "use_ep_level_unified_stream",
        "0",
        "Runs everything the provider does on one stream, so that nothing synchronises between streams.",
    ),
    integer(
        "sdpa_kernel",
        "0: chosen by the provider and ORT_* environment variables",
        "Attention kernels that may be used, as a sum: 1 flash, 2 memory-efficient, 4 TensorRT fused, "
        "8 cuDNN flash, 16 unfused, 32 and 64 TensorRT flash and cross, 256 lean, 512 decoder.",
        maximum=1023,
    ),
    switch("tunable_op_enable", "0", "Uses kernels chosen by TunableOp where there are any."),
    switch("tunable_op_tuning_enable", "0", "Lets TunableOp measure kernels while running; slow at first."),
    integer(
        "tunable_op_max_tuning_duration_ms",
        "0: no limit",
        "Milliseconds TunableOp may spend on each operator.",
    ),
    switch(
        "enable_cudnn",
        "1",
        "0 leaves cuDNN unloaded, which saves time and memory in models that need none of it; "
        "operators that need it are then missing.",
        since="1.30",
    ),
    integer(
        "external_data_loader_reading_threads",
        "4",
        "Threads that read external data into pinned buffers while earlier parts go to the GPU; "
        "1 reads without overlap, 0 goes through ordinary memory; weights inside the model file are not "
        "touched (#32713).",
        since="1.31",
        maximum=64,
    ),
    integer(
        "external_data_loader_pinned_memory_bytes",
        "built in",
        "Page-locked memory that those threads read into; range as session.external_data_loader's.",
        since="1.32",
        minimum=1024 * 1024,
        multiple=8192,
        maximum=1024 * 1024 * 1024,
    ),
    integer(
        "external_data_loader_chunk_bytes",
        "built in",
        "How much such a thread reads at a time; range as session.external_data_loader's.",
        since="1.32",
        minimum=4096,
        multiple=4096,
        maximum=64 * 1024 * 1024,
    ),
)
