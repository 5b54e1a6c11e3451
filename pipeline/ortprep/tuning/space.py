"""The search space of a model, a target and an ONNX Runtime: knobs, and which combinations differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ortprep.bundle.model_facts import ModelFacts
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.options import CUDA, NEWEST, known_options

Options = Mapping[str, int | bool | str]
"""Attributes of a session, session config entries and options of the CUDA execution provider, by name."""

Rule = tuple[Mapping[str, str], str, str]
"""Makes choices equal: a choice with these values takes, of the knob named next, the value named last."""

ATTRIBUTES = frozenset(option.name for option in known_options("attribute", NEWEST))
"""Those of the options that are attributes of `onnxruntime.SessionOptions`."""


@dataclass(frozen=True)
class PlanChoice:
    """One value for every knob.

    Attributes:
        values: (knob, value) in the order of the space's knobs.
    """

    values: tuple[tuple[str, str], ...]

    def __getitem__(self, knob: str) -> str:
        return dict(self.values)[knob]

    def __str__(self) -> str:
        return " ".join(f"{knob}={value}" for knob, value in self.values)

    def but(self, knob: str, value: str) -> PlanChoice:
        """Returns the choice with another value of one knob."""
        return PlanChoice(tuple((name, value if name == knob else old) for name, old in self.values))

    def as_dict(self) -> dict[str, str]:
        """Returns value by knob."""
        return dict(self.values)


DEFAULT = PlanChoice((("plan", "default"),))
"""The source in plain ONNX Runtime, `ORT_ENABLE_ALL`: the plan that every other one is compared with."""


@dataclass(frozen=True)
class Space:
    """Every plan that differs from every other.

    Attributes:
        knobs: Knobs to choose from: of each its values, each with the options it sets. The first value is
            used without a search.
        rules: Rules that make choices equal, applied in order.
    """

    knobs: Mapping[str, Mapping[str, Options]]
    rules: tuple[Rule, ...] = ()

    @cached_property
    def base(self) -> PlanChoice:
        """The first value of every knob: the plan without a search."""
        return self.canonical(PlanChoice(tuple((knob, next(iter(v))) for knob, v in self.knobs.items())))

    def canonical(self, choice: PlanChoice) -> PlanChoice:
        """Returns the one choice that stands for all equal ones."""
        for when, knob, value in self.rules:
            if value in self.knobs.get(knob, {}) and when.items() <= choice.as_dict().items():
                choice = choice.but(knob, value)
        return choice

    def neighbours(self, choice: PlanChoice) -> tuple[PlanChoice, ...]:
        """Returns every choice that differs from this one in a single knob."""
        changed = (choice.but(knob, value) for knob, values in self.knobs.items() for value in values)
        return tuple(other for other in dict.fromkeys(map(self.canonical, changed)) if other != choice)

    def describe(self, choice: PlanChoice) -> str:
        """Returns the changes of a choice from the base plan, for a message."""
        base = set(self.base.values)
        changed = [f"{knob}={value}" for knob, value in choice.values if (knob, value) not in base]
        return " ".join(changed) or "the base plan"

    def apply(
        self, choice: PlanChoice, options: SessionOptionsRecord, providers: tuple[ProviderRecord, ...]
    ) -> tuple[SessionOptionsRecord, tuple[ProviderRecord, ...]]:
        """Returns a plan's options and providers with what a choice sets on top."""
        attributes, entries, cuda = dict(options.attributes), dict(options.config_entries), dict[str, str]()
        for knob, value in choice.values:
            for option, setting in self.knobs[knob][value].items():
                if option in ATTRIBUTES:
                    attributes[option] = setting
                else:
                    (entries if "." in option else cuda)[option] = str(setting)
        tuned = options._replace(attributes=attributes, config_entries=entries)
        return tuned, tuple(
            provider._replace(options={**provider.options, **cuda}) if provider.name == CUDA else provider
            for provider in providers
        )


FORM, PREPACKING = "form", "prepacking"
THREADS, SPINNING = "threads", "spinning"

MAPPED, PREPACKED, ORT = "mapped", "prepacked", "ort"
"""Forms: external data that is mapped; the same with the arranged copies of prepacking beside it; ONNX
Runtime's own format, mapped."""

ON, OFF = "on", "off"

MAX_ORT_BYTES = 1_900_000_000
"""Weights above this size are not written into one file: flatbuffers end at 2 GiB."""

Values = Mapping[str, Options]
"""Values of a knob, each with the options it sets; one that sets none leaves ONNX Runtime's default."""

_NO_PREPACKING: Options = {"session.disable_prepacking": "1"}
_MAPPED_ORT: Options = {
    "session.use_memory_mapped_ort_model": "1",
    "session.use_ort_model_bytes_for_initializers": "1",
}
_RULES = (
    # A file's arranged copies are not looked at without prepacking: it is then the plain mapped file.
    ({FORM: PREPACKED, PREPACKING: OFF}, FORM, MAPPED),
    # One thread prepacks alone, and has nobody to wait for.
    ({THREADS: "1", PREPACKING: "parallel"}, PREPACKING, ON),
    ({THREADS: "1"}, SPINNING, ON),
    ({"cudnn": OFF}, "convolution_search", "exhaustive"),
)


@dataclass(frozen=True)
class Conditions:
    """Machine and settings of a search.

    Attributes:
        cores: Processors the session may use.
        is_source: Whether the model is shipped as it is, and so has no other form.
        fixed_shapes: Whether all samples have the same shapes.
        fixed: Options the user has set, with their values; these are not searched.
    """

    target: str
    onnxruntime: str
    cores: int
    is_source: bool = False
    fixed_shapes: bool = False
    fixed: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_helpers(self) -> bool:
        """Whether several threads can work on one operator."""
        return self.cores > 1 and self.fixed.get("intra_op_num_threads") != "1"


def build_space(facts: ModelFacts, conditions: Conditions) -> Space:
    """Returns every plan that could be better than another."""
    version, fixed = conditions.onnxruntime, set(conditions.fixed)
    listed = (*known_options("session", version), *known_options(CUDA, version))
    known = {option.name for option in listed} | ATTRIBUTES
    table = _cuda_knobs if conditions.target == "cuda" else _cpu_knobs
    knobs: dict[str, Values] = {}
    for knob, values in table(facts, conditions).items():
        free = {value: options for value, options in values.items() if fixed.isdisjoint(options)}
        usable = {value: options for value, options in free.items() if known.issuperset(options)}
        # A file has a form, whatever the user decides; anything else the user may decide.
        if knob == FORM or (len(free) == len(values) and len(usable) > 1):
            knobs[knob] = usable
    return Space(knobs, _RULES)


def _when(condition: bool, values: Values) -> Values:
    """Returns values, or none unless a condition holds; a knob with a single value is left out."""
    return values if condition else {}


def _cpu_knobs(facts: ModelFacts, conditions: Conditions) -> dict[str, Values]:
    """Returns every knob of a session on the CPU, those without effect with fewer than two values."""
    one_file = not conditions.is_source and facts.initializer_bytes <= MAX_ORT_BYTES
    prepacked = not conditions.is_source and conditions.fixed.get("session.disable_prepacking") != "1"
    counts = dict.fromkeys((conditions.cores // 2, conditions.cores // 4, 1))
    return {
        # How weights are stored.
        FORM: {
            MAPPED: {},
            **_when(one_file, {ORT: _MAPPED_ORT}),
            **_when(prepacked, {PREPACKED: {}}),
        },
        # Whether weights are rearranged for this processor's kernels at every load.
        PREPACKING: {
            ON: {},
            OFF: _NO_PREPACKING,
            **_when(conditions.has_helpers, {"parallel": {"session.prepack.enable_parallel": "1"}}),
        },
        # Threads that share the work of one operator: all physical cores, half and a quarter of the
        # processors, and one.
        THREADS: {"all": {}}
        | {str(count): {"intra_op_num_threads": count} for count in counts if 1 <= count < conditions.cores},
        # Whether idle threads spin.
        SPINNING: _when(conditions.has_helpers, {ON: {}, OFF: {"session.intra_op.allow_spinning": "0"}}),
        # Whether freed memory is kept for later runs.
        "memory_arena": {ON: {}, OFF: {"enable_cpu_mem_arena": False}},
        # Whether a run's tensors are planned as one block, which takes a fixed order of operators.
        "memory_pattern": _when(
            conditions.fixed_shapes and conditions.fixed.get("execution_mode") != "ORT_PARALLEL",
            {ON: {}, OFF: {"enable_mem_pattern": False}},
        ),
        "device_allocator": _DEVICE_ALLOCATOR,
    }


_DEVICE_ALLOCATOR: Values = {OFF: {}, ON: {"session.use_device_allocator_for_initializers": "1"}}
"""Whether weights are allocated outside the arena, which then does not grow around them."""


def _cuda_knobs(facts: ModelFacts, _: Conditions) -> dict[str, Values]:
    """Returns every knob of a session on CUDA, those without effect with fewer than two values."""
    convolutions = facts.has_convolutions
    return {
        FORM: {MAPPED: {}},
        PREPACKING: {ON: {}, OFF: _NO_PREPACKING},
        "device_allocator": _DEVICE_ALLOCATOR,
        # How a convolution's plan is found in the first run of a shape.
        "convolution_search": _when(
            convolutions, {"exhaustive": {}, "heuristic": {"cudnn_conv_algo_search": "HEURISTIC"}}
        ),
        # Memory that such plans may use.
        "workspace": _when(convolutions, {"most": {}, "least": {"cudnn_conv_use_max_workspace": "0"}}),
        "channels_last": _when(convolutions, {OFF: {}, ON: {"prefer_nhwc": "1"}}),
        # Whether convolution and bias are one kernel.
        "bias_fusion": _when(convolutions, {OFF: {}, ON: {"fuse_conv_bias": "1"}}),
        "arena_growth": {"power": {}, "same": {"arena_extend_strategy": "kSameAsRequested"}},
        # Threads that read weights.
        "reading_threads": {
            "four": {},
            "none": {"external_data_loader_reading_threads": "0"},
            "eight": {"external_data_loader_reading_threads": "8"},
        },
        # Whether cuDNN is loaded.
        "cudnn": _when(not convolutions, {ON: {}, OFF: {"enable_cudnn": "0"}}),
    }


def shares_files(first: PlanChoice, second: PlanChoice) -> bool:
    """Says whether the first plan can be loaded from the files of the second."""
    own, other = first.as_dict(), second.as_dict()
    # Without prepacking a file's arranged copies are not looked at.
    unpacked = own.get(FORM) == MAPPED and own.get(PREPACKING) == OFF
    return own.get(FORM) == other.get(FORM) or (unpacked and other.get(FORM) == PREPACKED)
