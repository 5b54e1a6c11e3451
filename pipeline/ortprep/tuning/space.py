"""Knobs, their values, and which combinations differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.options import CUDA, NEWEST, known_attributes

Options = Mapping[str, int | bool | str]
"""Attributes of a session, session config entries and options of the CUDA execution provider, by name."""

Rule = tuple[Mapping[str, str], str, str]
"""Makes choices equal: a choice with these values takes, of the knob named next, the value named last."""

ATTRIBUTES = frozenset(option.name for option in known_attributes(NEWEST))
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
