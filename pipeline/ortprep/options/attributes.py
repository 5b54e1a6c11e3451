"""Plain attributes of `onnxruntime.SessionOptions`."""

from __future__ import annotations

from ortprep.options.option import Option, integer, switch

_MAX_THREADS = 1024
"""Far above any machine; ONNX Runtime takes a million without a word and negative counts too (measured)."""

ATTRIBUTES = (
    integer(
        "intra_op_num_threads",
        "0: one thread per physical core",
        "Threads that share the work of one operator; 1 runs everything on the calling thread.",
        maximum=_MAX_THREADS,
    ),
    integer(
        "inter_op_num_threads",
        "0: one thread per physical core",
        "Threads that run independent operators side by side; used with ORT_PARALLEL only.",
        maximum=_MAX_THREADS,
    ),
    Option(
        "execution_mode",
        "choice",
        default="ORT_SEQUENTIAL",
        effect="Whether operators run one after the other or, in graphs with branches, several at once.",
        values=("ORT_SEQUENTIAL", "ORT_PARALLEL"),
    ),
    Option(
        "execution_order",
        "choice",
        default="DEFAULT",
        effect="Order of operators that do not depend on each other; MEMORY_EFFICIENT frees tensors early.",
        values=("DEFAULT", "PRIORITY_BASED", "MEMORY_EFFICIENT"),
    ),
    switch(
        "enable_cpu_mem_arena",
        "1",
        "Keeps freed CPU memory for later runs; off gives memory back at the price of slower runs.",
    ),
    switch(
        "enable_mem_pattern",
        "1",
        "Plans one block for all tensors of a shape from its second run on; of no use if shapes vary.",
    ),
    switch(
        "enable_mem_reuse",
        "1",
        "Lets a tensor take the memory of one that is no longer needed; off only to debug.",
    ),
    switch(
        "use_deterministic_compute",
        "0",
        "Picks kernels that give the same bits on every run where there is a choice, perhaps slower.",
    ),
    integer(
        "log_severity_level",
        "-1: the environment's, which is 2",
        "Lowest severity that is logged: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal.",
        minimum=-1,
        maximum=4,
    ),
    integer(
        "log_verbosity_level", "0", "How much verbose logging says, if log_severity_level is 0.", maximum=None
    ),
    Option(
        "logid",
        "text",
        default="empty",
        effect="Name of the session in log lines.",
        pattern=r".{0,128}",
        form="up to 128 characters, none of them a control character",
    ),
)
