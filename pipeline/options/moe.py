"""Session config entries about mixtures of experts: MoE and QMoE nodes.

ONNX Runtime refuses a `session.moe.offload.*` entry that it does not know, and every bad value of one (tried
on 1.32.0). Its CUDA plugin 0.4 is the first provider that offloads experts.
"""

from __future__ import annotations

from ortprep.options.option import NEWEST_WHEEL, Option, switch

_INT_MAX = 2**31 - 1
_SIZE_MAX = 2**63 - 1
_FILE = "a session that jobs load reads the bundle's own files and writes none"
_BYTES = r"auto|[0-9]{1,19}"
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
    Option(
        "session.moe_expert_counter_state_file",
        "text",
        default="every count starts at 0",
        effect="Text file of the counts to start from; one session.enable_moe_expert_* switch must be on.",
        since="1.31",
        owner=_FILE,
    ),
)


def _offload_text(name: str, default: str, effect: str, *, pattern: str, form: str) -> Option:
    return Option(
        f"session.moe.offload.{name}",
        "text",
        default=default,
        effect=effect,
        since="1.32",
        pattern=pattern,
        form=form,
        source=NEWEST_WHEEL,
    )


def _offload_choice(name: str, default: str, effect: str, values: tuple[str, ...]) -> Option:
    return Option(
        f"session.moe.offload.{name}",
        "choice",
        default=default,
        effect=effect,
        since="1.32",
        values=values,
        source=NEWEST_WHEEL,
    )


def _offload_number(
    name: str, effect: str, *, minimum: int = 0, maximum: int | None = _INT_MAX, fraction: bool = False
) -> Option:
    return Option(
        f"session.moe.offload.{name}",
        "number" if fraction else "integer",
        default="built in",
        effect=effect,
        since="1.32",
        minimum=minimum,
        maximum=maximum,
        source=NEWEST_WHEEL,
    )


def _offload_switch(name: str, effect: str, *, owner: str | None = None) -> Option:
    return switch(
        f"session.moe.offload.{name}", "built in", effect, since="1.32", owner=owner, source=NEWEST_WHEEL
    )


_OFFLOAD = (
    _offload_choice(
        "mode",
        "disabled",
        "Keeps experts that do not fit the GPU elsewhere: auto where it can, required or not at all.",
        ("disabled", "auto", "required"),
    ),
    _offload_choice(
        "placement",
        "built in",
        "Whether the experts on the GPU stay the same or follow their use.",
        ("static", "adaptive"),
    ),
    _offload_choice(
        "cpu_execution",
        "auto",
        "Whether the CPU computes the experts that are in its memory.",
        ("auto", "enabled", "disabled"),
    ),
    *(
        _offload_text(
            f"{name}_bytes",
            "auto",
            effect,
            pattern=_BYTES,
            form="auto or a number of bytes",
        )
        for name, effect in (
            (
                "device_expert",
                "Memory for experts on the GPU; excludes session.moe.offload.gpu_budget_bytes.",
            ),
            (
                "gpu_budget",
                "Memory for experts on the GPU; excludes session.moe.offload.device_expert_bytes.",
            ),
            ("host_expert", "Memory for experts on the CPU."),
            ("pinned", "Page-locked CPU memory for experts."),
            ("reserve_device", "GPU memory that experts leave free."),
        )
    ),
    *(
        _offload_number(
            f"{name}_working_bytes", f"Scratch memory on the {device}.", minimum=1, maximum=_SIZE_MAX
        )
        for name, device in (("device", "GPU"), ("host", "CPU"))
    ),
    _offload_number(
        "gpu_device_mem_limit",
        "Limit of GPU memory that budgets are derived from; 0 is none.",
        maximum=_SIZE_MAX,
    ),
    _offload_text(
        "budget_group",
        "empty",
        "Name of the budget that several sessions share.",
        pattern=r"[A-Za-z0-9_.-]{0,64}",
        form="up to 64 letters, digits, dots, dashes and underscores",
    ),
    _offload_number("cpu_threads", "CPU threads that compute experts."),
    _offload_number(
        "async_max_tokens", "Largest number of tokens for which experts are copied asynchronously."
    ),
    _offload_number(
        "prefill_wave_experts", "Experts that are copied at a time when a prompt is read.", minimum=1
    ),
    _offload_text(
        "node_overrides",
        "empty",
        "Budgets of single nodes, by name: max_resident_slots, device_expert_bytes or both.",
        pattern=rf"({_OVERRIDE}(;{_OVERRIDE})*)?",
        form="entries as in moe_1:max_resident_slots=8,device_expert_bytes=4096;moe_2:max_resident_slots=4",
    ),
    _offload_number(
        "min_expert_weight", "Experts with a smaller routing weight are left out.", maximum=1, fraction=True
    ),
    _offload_switch(
        "skip_tail_cold_only", "Leaves out experts of small weight only if they are not on the GPU."
    ),
    _offload_switch(
        "skip_zero_cold_doorbell", "Spares the CPU a signal where all chosen experts are on the GPU."
    ),
    _offload_number(
        "tail_substitution_threshold",
        "Weight below which an expert that is on the GPU stands in for one that is not; results change.",
        maximum=None,
        fraction=True,
    ),
    _offload_number(
        "tail_substitution_min_rank", "First rank of chosen experts that may be replaced in this way."
    ),
    _offload_switch("allow_file_backing", "Lets experts stay in files.", owner=_FILE),
    *(
        Option(
            f"session.moe.offload.{name}",
            "text",
            default="none",
            effect=effect,
            since="1.32",
            owner=_FILE,
            source=NEWEST_WHEEL,
        )
        for name, effect in (
            ("popularity_file", "File that says how often each expert is chosen."),
            ("source_root", "Folder of files with experts."),
            ("derived_cache_dir", "Folder for experts in the layout of the kernels."),
        )
    ),
)

MOE = (*_COUNTING, *_OFFLOAD)
