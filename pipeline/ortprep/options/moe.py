"""Session config entries about mixtures of experts: MoE and QMoE nodes.

ONNX Runtime refuses a `session.moe.offload.*` entry that it does not know, and every bad value of one (tried
on 1.32.0). Its CUDA plugin 0.4 is the first provider that offloads experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ortprep.options.option import INT_MAX, SIZE_MAX, Kind, Option, switch

_OVERRIDE = r"[^:;,=]+:[a-z_]+=[0-9]{1,19}(,[a-z_]+=[0-9]{1,19})?"

_COUNTING = (
    switch(
        "session.enable_moe_expert_counting",
        "0",
        "Counts how often each expert of MoE and QMoE nodes is chosen; excludes CUDA graphs and overlapping "
        "runs.",
        since="1.31",
    ),
    switch(
        "session.enable_moe_expert_statistics",
        "0",
        "Logs which experts MoE and QMoE nodes choose in every run.",
        since="1.31",
    ),
    *(
        Option(
            f"session.moe_expert_counter_{name}",
            "number",
            default=default,
            effect=f"{meaning} of the moving count of experts; alpha and beta sum to at most 1, and one "
            "session.enable_moe_expert_* switch must be on.",
            since="1.31",
            minimum=0,
            maximum=1,
        )
        for name, default, meaning in (
            ("alpha", "0.9", "Share that is kept at each step"),
            ("beta", "0.1", "Share that a use adds"),
        )
    ),
)


def _offload(kind: Kind, name: str, effect: str, default: str = "built in", **limits: Any) -> Option:
    return Option(f"session.moe.offload.{name}", kind, default, effect, since="1.32", **limits)


_count = partial(_offload, "integer", minimum=0, maximum=INT_MAX)

_OFFLOAD = (
    _offload(
        "choice",
        "mode",
        "Keeps experts that do not fit the GPU elsewhere: auto where it can, required or not at all.",
        "disabled",
        values=("disabled", "auto", "required"),
    ),
    _offload(
        "choice",
        "placement",
        "Whether the experts on the GPU stay the same or follow their use.",
        values=("static", "adaptive"),
    ),
    _offload(
        "choice",
        "cpu_execution",
        "Whether the CPU computes the experts that are in its memory.",
        "auto",
        values=("auto", "enabled", "disabled"),
    ),
    *(
        _offload("text", name, effect, "auto", pattern=r"auto|[0-9]{1,19}", form="auto or a number of bytes")
        for name, effect in {
            "device_expert_bytes": "Memory for experts on the GPU; excludes gpu_budget_bytes.",
            "gpu_budget_bytes": "Memory for experts on the GPU; excludes device_expert_bytes.",
            "host_expert_bytes": "Memory for experts on the CPU.",
            "pinned_bytes": "Page-locked CPU memory for experts.",
            "reserve_device_bytes": "GPU memory that experts leave free.",
        }.items()
    ),
    _offload("integer", "device_working_bytes", "Scratch memory on the GPU.", minimum=1, maximum=SIZE_MAX),
    _offload("integer", "host_working_bytes", "Scratch memory on the CPU.", minimum=1, maximum=SIZE_MAX),
    _count(
        "gpu_device_mem_limit",
        "Limit of GPU memory that budgets are derived from; 0 is none.",
        maximum=SIZE_MAX,
    ),
    _offload(
        "text",
        "budget_group",
        "Name of the budget that several sessions share.",
        "empty",
        pattern=r"[A-Za-z0-9_.-]{0,64}",
        form="up to 64 letters, digits, dots, dashes and underscores",
    ),
    _count("cpu_threads", "CPU threads that compute experts."),
    _count("async_max_tokens", "Largest number of tokens for which experts are copied asynchronously."),
    _count("prefill_wave_experts", "Experts that are copied at a time when a prompt is read.", minimum=1),
    _offload(
        "text",
        "node_overrides",
        "Budgets of single nodes, by name: max_resident_slots, device_expert_bytes or both.",
        "empty",
        pattern=rf"({_OVERRIDE}(;{_OVERRIDE})*)?",
        form="entries as in moe_1:max_resident_slots=8,device_expert_bytes=4096;moe_2:max_resident_slots=4",
    ),
    _offload(
        "number",
        "min_expert_weight",
        "Experts with a smaller routing weight are left out.",
        minimum=0,
        maximum=1,
    ),
    _offload(
        "switch", "skip_tail_cold_only", "Leaves out experts of small weight only if they are not on the GPU."
    ),
    _offload(
        "switch",
        "skip_zero_cold_doorbell",
        "Spares the CPU a signal if all chosen experts are on the GPU.",
    ),
    _offload(
        "number",
        "tail_substitution_threshold",
        "Weight below which an expert that is on the GPU stands in for one that is not; results change.",
        minimum=0,
    ),
    _count("tail_substitution_min_rank", "First rank of chosen experts that may be replaced in this way."),
)

MOE = (*_COUNTING, *_OFFLOAD)
