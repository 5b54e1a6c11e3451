"""Plain attributes of `onnxruntime.SessionOptions`."""

from __future__ import annotations

from functools import partial

from ortprep.options.option import ATTRIBUTE, Option, switch

_MAX_THREADS = 1024
"""Far above any machine; ONNX Runtime takes a million without a word and negative counts too (measured)."""

_attribute = partial(Option, source=ATTRIBUTE)
_switch = partial(switch, source=ATTRIBUTE)

ATTRIBUTES = (
    _attribute(
        "intra_op_num_threads",
        "integer",
        default="0: one thread per physical core",
        effect="Threads that share the work of one operator; 1 runs everything on the calling thread.",
        minimum=0,
        maximum=_MAX_THREADS,
    ),
    _attribute(
        "inter_op_num_threads",
        "integer",
        default="0: one thread per physical core",
        effect="Threads that run independent operators side by side; used with ORT_PARALLEL only.",
        minimum=0,
        maximum=_MAX_THREADS,
    ),
    _attribute(
        "execution_mode",
        "choice",
        default="ORT_SEQUENTIAL",
        effect="Whether operators run one after the other or, in graphs with branches, several at once.",
        values=("ORT_SEQUENTIAL", "ORT_PARALLEL"),
    ),
    _attribute(
        "execution_order",
        "choice",
        default="DEFAULT",
        effect="Order of operators that do not depend on each other; MEMORY_EFFICIENT frees tensors early.",
        values=("DEFAULT", "PRIORITY_BASED", "MEMORY_EFFICIENT"),
    ),
    _switch(
        "enable_cpu_mem_arena",
        "1",
        "Keeps freed CPU memory for later runs; off gives memory back at the price of slower runs.",
    ),
    _switch(
        "enable_mem_pattern",
        "1",
        "Plans one block for all tensors of a shape from its second run on; of no use if shapes vary.",
    ),
    _switch(
        "enable_mem_reuse",
        "1",
        "Lets a tensor take the memory of one that is no longer needed; off only to debug.",
    ),
    _switch(
        "use_deterministic_compute",
        "0",
        "Picks kernels that give the same bits on every run where there is a choice, perhaps slower.",
    ),
    _attribute(
        "log_severity_level",
        "integer",
        default="-1: the environment's, which is 2",
        effect="Lowest severity that is logged: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal.",
        minimum=-1,
        maximum=4,
    ),
    _attribute(
        "log_verbosity_level",
        "integer",
        default="0",
        effect="How much verbose logging says, if log_severity_level is 0.",
        minimum=0,
    ),
    _attribute(
        "logid",
        "text",
        default="empty",
        effect="Name of the session in log lines.",
        pattern=r".{0,128}",
        form="up to 128 characters, none of them a control character",
    ),
    _attribute(
        "graph_optimization_level",
        "choice",
        default="ORT_ENABLE_ALL",
        effect="Which graph optimisations run when the session is made.",
        values=(
            "ORT_DISABLE_ALL",
            "ORT_ENABLE_BASIC",
            "ORT_ENABLE_EXTENDED",
            "ORT_ENABLE_LAYOUT",
            "ORT_ENABLE_ALL",
        ),
        owner="prepared graphs load with optimisation off; optimize.level of the spec says how they are made",
    ),
    _attribute(
        "optimized_model_filepath",
        "text",
        default="empty: nothing is written",
        effect="Where the optimised graph is written when the session is made.",
        owner="the optimize stage decides where prepared graphs go",
    ),
    _switch(
        "enable_profiling",
        "0",
        "Writes a Chrome trace of the session; slows every run.",
        owner="a measured or served session is never profiled",
    ),
    _attribute(
        "profile_file_prefix",
        "text",
        default="onnxruntime_profile_",
        effect="Start of the name of the trace that enable_profiling writes.",
        owner="a measured or served session is never profiled",
    ),
    _switch(
        "use_per_session_threads",
        "1",
        "Gives the session threads of its own instead of the process's global ones.",
        owner="without global thread pools, which Python cannot make, session creation fails",
    ),
)
