"""Session config entries that providers and their kernels read: `ep.*` and `mlas.*`."""

from __future__ import annotations

from ortprep.options.option import SIZE_MAX, Option, integer, switch

_MLAS = (
    switch(
        "mlas.enable_gemm_fastmath_arm64_bfloat16",
        "0",
        "Multiplies float32 matrices in bfloat16 on Arm: faster, less exact.",
    ),
    switch("mlas.disable_kleidiai", "0", "Leaves the KleidiAI kernels for Arm unused.", since="1.25"),
    integer(
        "mlas.kleidiai.conv_igemm_max_work",
        "built in",
        "Largest convolution that KleidiAI runs as an indirect matrix product; a bad value aborts the "
        "process.",
        since="1.28",
        maximum=SIZE_MAX,
    ),
    switch(
        "mlas.use_lut_gemm",
        "0",
        "Runs low-bit MatMulNBits by look-up tables where the CPU and the shape allow.",
        since="1.24",
    ),
    switch(
        "mlas.qnbit.force_fp32",
        "0",
        "Makes MatMulNBits on CPU compute in float32: more exact, slower.",
        since="1.31",
    ),
    integer(
        "mlas.nchwc_pointwise_conv_max_input_channel_batch",
        "built in",
        "How many input channels a pointwise convolution in NCHWc layout takes at a time; a bad value "
        "aborts the process.",
        since="1.30",
        maximum=SIZE_MAX,
    ),
    switch(
        "mlas.nchwc_depthwise_sliding",
        "built in",
        "Runs depthwise convolutions in NCHWc layout with a sliding window.",
        since="1.31",
    ),
)

_CUDA = (
    Option(
        "ep.cuda.fpa_intb_gemm",
        "choice",
        default="0, or the environment's ORT_FPA_INTB_GEMM",
        effect="Runs MatMulNBits in float16 or bfloat16 by CUTLASS kernels that keep the weights low-bit.",
        since="1.30",
        values=("0", "1", "off", "on"),
    ),
    Option(
        "ep.cuda.fpa_intb_profile_m",
        "text",
        default="built in, or the environment's ORT_FPA_INTB_PROFILE_M",
        effect="Row counts for which those kernels are timed when the session is made.",
        since="1.30",
        pattern=r"[1-9][0-9]*(,[1-9][0-9]*)*",
        form="row counts as in 1,64,2048",
    ),
    integer(
        "ep.cuda.qmoe_row_tile_size",
        "built in, or the environment's ORT_QMOE_ROW_TILE_SIZE",
        "Rows that QMoE processes at a time, which bounds its scratch memory.",
        since="1.30",
        minimum=1,
    ),
    integer(
        "ep.cuda.qmoe_int_dequant_max_scratch_bytes",
        "built in, or the environment's ORT_QMOE_INT_DEQUANT_MAX_SCRATCH_BYTES",
        "Most scratch memory QMoE takes for dequantised integer weights.",
        since="1.31",
        maximum=SIZE_MAX,
    ),
    Option(
        "ep.cuda.fpa_intb_gemv_paired_k",
        "choice",
        default="built in, or the environment's ORT_FPA_INTB_GEMV_PAIRED_K",
        effect="Whether the low-bit product with few rows takes its inner axis in pairs.",
        since="1.31",
        values=("0", "1", "off", "force"),
    ),
    switch(
        "ep.cuda.fpa_intb_gemv_wave_aware",
        "built in",
        "Cuts the low-bit product with few rows to fill the GPU's multiprocessors evenly.",
        since="1.31",
    ),
    integer(
        "ep.cuda.matmul_nbits_m_chunk_size",
        "0: not cut, or the environment's ORT_MATMULNBITS_M_CHUNK_SIZE",
        "Computes large MatMulNBits in chunks of that many rows, which bounds their scratch memory.",
        since="1.31",
    ),
    switch(
        "ep.cuda.enable_gemm_auto_tune",
        "0, or the environment's ORT_CUDA_GEMM_AUTO_TUNE",
        "Times cuBLAS against other kernels for half-precision products with few rows and keeps the faster.",
        since="1.31",
    ),
    integer(
        "ep.cuda.gqa_workspace_max_total_sequence_length",
        "unset",
        "Longest sequence for which the workspace of GroupQueryAttention is estimated.",
        since="1.31",
        maximum=SIZE_MAX,
    ),
)

_NEWEST = (
    Option(
        "session.kernel_dispatch_policy",
        "choice",
        default="empty: the provider's own",
        effect="What counts where a provider has several kernels for a node. ONNX Runtime's core reads it "
        "beside the options of low-bit matrix products on CUDA.",
        since="1.32",
        values=("", "auto", "latency", "memory", "safe"),
    ),
    switch(
        "ep.cpu.qmoe_deferred_scale",
        "built in",
        "Makes QMoE on CPU apply the scales of its weights after the products.",
        since="1.32",
    ),
    integer(
        "ep.cuda.fpa_intb_dequant_gemm_min_m",
        "built in",
        "Rows from which MatMulNBits dequantises its weights and multiplies by cuBLAS.",
        since="1.32",
    ),
    switch(
        "ep.cuda.matmul_packed_allow_unrounded_gemv",
        "0",
        "Lets products of up to 8 rows with packed weights skip rounding them to the other side's type.",
        since="1.32",
    ),
    integer(
        "ep.cuda.moe_packed_gpu_experts",
        "built in, or the environment's ORT_MOE_PACKED_GPU_EXPERTS",
        "Experts of MoEPacked nodes that stay on the GPU.",
        since="1.32",
    ),
    *(
        switch(
            f"ep.cuda.runtime_fusion.{name}",
            "built in",
            f"Fuses {what} when the graph is split among providers.",
            since="1.32",
        )
        for name, what in (
            ("causal_conv_with_state", "a causal convolution with its state"),
            ("unit_swish", "x · Sigmoid(x) to Swish"),
        )
    ),
)

KERNEL_CONFIG = (*_MLAS, *_CUDA, *_NEWEST)
