"""Session config entries about how the graph is rewritten and split among providers.

Rewriting is done when the graph is optimised: on a prepared graph, which loads with optimisation off, most of
these do nothing. The effects say so where it is not plain.
"""

from __future__ import annotations

from ortprep.options.option import SIZE_MAX, Option, integer, switch

_RULE = r"[^;()]+\([^;()]+\)\s*"
_RULES = rf"({_RULE}(;{_RULE})*;?)?"


_OPTIMIZERS = (
    Option(
        "optimization.disable_specified_optimizers",
        "text",
        default="empty: none",
        effect="Graph transformers that do not run, by name, separated by semicolons; a comma separates "
        "nothing, whatever the header says.",
        owner="list them under optimize.disabled_optimizers of the spec",
    ),
    switch(
        "optimization.enable_gelu_approximation",
        "0",
        "Replaces Gelu by a faster approximation; results change slightly.",
    ),
    switch(
        "optimization.enable_cast_chain_elimination",
        "0",
        "Merges chains of Cast nodes; results can change where a chain lost precision on purpose.",
    ),
    integer(
        "optimization.constant_folding_max_output_size_in_bytes",
        "1073741824",
        "Largest result that constant folding stores as a weight; 0 is no limit.",
        since="1.27",
        maximum=SIZE_MAX,
    ),
    Option(
        "optimization.minimal_build_optimizations",
        "choice",
        default="empty: what a full build does",
        effect="Saves optimisations for minimal builds into an .ort model, or applies only those.",
        values=("", "save", "apply"),
    ),
    Option(
        "session.graph_optimizations_loop_level",
        "choice",
        default="1",
        effect="Whether optimisation starts over: 0 never, 1 if the last level changed something, 2 if any "
        "level from EXTENDED on did.",
        values=("0", "1", "2"),
    ),
    switch(
        "session.disable_aot_function_inlining",
        "0",
        "Keeps calls of model-local functions until a provider is chosen for them; inlining runs even with "
        "optimisation off.",
    ),
    *(
        integer(
            f"session.function_expansion_{what}_limit",
            "built in",
            f"How many {unit} inlining functions may add before the remaining calls stay.",
            since="1.31",
            minimum=1,
            maximum=SIZE_MAX,
        )
        for what, unit in (("node", "nodes"), ("byte", "bytes"))
    ),
    Option(
        "session.gqa_value_layout",
        "choice",
        default="BNSH",
        effect="Layout in which the application binds the value cache of GroupQueryAttention.",
        since="1.30",
        values=("BNSH", "BNHS"),
    ),
)

_QUANTIZATION = (
    switch(
        "session.disable_quant_qdq",
        "0",
        "Leaves QuantizeLinear and DequantizeLinear as they are instead of fusing quantised operators.",
    ),
    switch(
        "session.disable_qdq_constant_folding",
        "0",
        "Keeps DequantizeLinear of weights even where session.disable_quant_qdq is on.",
        since="1.26",
    ),
    switch(
        "session.disable_double_qdq_remover",
        "0",
        "Keeps the inner pair of two quantise-dequantise pairs in a row.",
    ),
    switch(
        "session.enable_quant_qdq_cleanup",
        "0",
        "Removes quantise-dequantise pairs that are left after fusion: faster, another accuracy.",
    ),
    switch(
        "session.qdqisint8allowed",
        "0 on x86-64, 1 on Arm",
        "Keeps int8 activations in an .ort model, which suits Arm.",
    ),
    switch(
        "session.x64quantprecision",
        "0",
        "Multiplies uint8 by uint8 on AVX2 and AVX-512 without VNNI, where uint8 by int8 can overflow; slow.",
    ),
    Option(
        "session.qdq_matmulnbits_accuracy_level",
        "choice",
        default="4",
        effect="Precision in which MatMulNBits made from dequantise and MatMul computes: 0 unset, 1 float32, "
        "2 float16, 3 bfloat16, 4 int8.",
        values=("0", "1", "2", "3", "4"),
    ),
    integer(
        "session.qdq_matmulnbits_block_size",
        "0: 32",
        "Block size of MatMulNBits made from dequantise and MatMul; -1 picks the one that pads least.",
        since="1.25",
        minimum=-1,
    ),
    switch(
        "session.enable_dq_matmulnbits_fusion",
        "0",
        "Fuses dequantise and MatMul into MatMulNBits.",
        since="1.24.4",
    ),
)

_PARTITIONING = (
    Option(
        "session.layer_assignment_settings",
        "text",
        default="empty",
        effect="Puts nodes on devices by their layer_ann annotation; excludes "
        "session.name_based_layer_assignment.",
        since="1.25",
        pattern=_RULES,
        form="rules as in gpu(encoder,=head);cpu(embedding)",
    ),
    Option(
        "session.name_based_layer_assignment",
        "text",
        default="empty",
        effect="Puts nodes on devices by parts of their names; excludes session.layer_assignment_settings.",
        since="1.28",
        pattern=_RULES,
        form="rules as in gpu(layers.0,layers.1);cpu(embed)",
    ),
    Option(
        "session.max_shape_override",
        "text",
        default="empty",
        effect="Largest shapes of inputs, for estimates when nodes are put on devices; limits no run.",
        since="1.29",
        pattern=r"([^:;]+:\s*\[\s*[1-9][0-9]*(\s*,\s*[1-9][0-9]*)*\s*\]\s*(;|$))*",
        form="inputs with positive sizes, as in ids:[8,4096];mask:[8,4096]",
    ),
    switch(
        "session.strict_workspace_verification",
        "0",
        "Fails if a kernel wants more workspace than was set aside when nodes were put on devices.",
        since="1.31",
    ),
)

REWRITING_CONFIG = (*_OPTIMIZERS, *_QUANTIZATION, *_PARTITIONING)
