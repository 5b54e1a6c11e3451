"""Knobs, their values, and which combinations differ. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import TuningError

CUDA = "CUDAExecutionProvider"


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
class Setting:
    """One value of a knob, and its effect on a session.

    Attributes:
        name: The value's name in a choice.
        provider_options: Options of the CUDA execution provider.
    """

    name: str
    attributes: Mapping[str, int | bool | str] = field(default_factory=dict)
    config_entries: Mapping[str, str] = field(default_factory=dict)
    provider_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Knob:
    """One setting that can be chosen.

    Attributes:
        settings: Its values; the first is used without a search.
        effect: What it decides, in a sentence.
        shapes_file: Whether it decides what is written, not only how that is loaded.
    """

    name: str
    settings: tuple[Setting, ...]
    effect: str
    shapes_file: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the values."""
        return tuple(setting.name for setting in self.settings)

    def setting(self, name: str) -> Setting:
        """Returns the value of that name.

        Raises:
            TuningError: There is none.
        """
        found = next((setting for setting in self.settings if setting.name == name), None)
        if found is None:
            raise TuningError(
                f"no such value of {self.name}: {name!r}\n  expected one of {', '.join(self.values)}"
            )
        return found


@dataclass(frozen=True)
class Rule:
    """Makes two choices equal: where all of `when` holds, `then` replaces the value."""

    when: Mapping[str, str]
    then: tuple[str, str]


@dataclass(frozen=True)
class Space:
    """Every plan that differs from every other.

    Attributes:
        rules: Which choices are equal, applied in order.
    """

    knobs: tuple[Knob, ...]
    rules: tuple[Rule, ...] = ()

    @property
    def base(self) -> PlanChoice:
        """The first value of every knob: the plan without a search."""
        return self.canonical(PlanChoice(tuple((knob.name, knob.values[0]) for knob in self.knobs)))

    def canonical(self, choice: PlanChoice) -> PlanChoice:
        """Returns the one choice that stands for all equal ones."""
        names = {knob.name for knob in self.knobs}
        for rule in self.rules:
            knob, value = rule.then
            values = choice.as_dict()
            holds = all(values.get(name) == wanted for name, wanted in rule.when.items())
            if holds and knob in names and value in self.knob(knob).values:
                choice = choice.but(knob, value)
        return choice

    def knob(self, name: str) -> Knob:
        """Returns the knob of that name.

        Raises:
            TuningError: There is none.
        """
        found = next((knob for knob in self.knobs if knob.name == name), None)
        if found is None:
            names = ", ".join(knob.name for knob in self.knobs)
            raise TuningError(f"no such knob: {name!r}\n  expected one of {names}")
        return found

    @property
    def combinations(self) -> int:
        """Number of combinations of values, equal ones counted each."""
        return math.prod(len(knob.settings) for knob in self.knobs)

    def choices(self) -> Iterator[PlanChoice]:
        """Yields every choice that differs from the others, once."""
        seen: set[PlanChoice] = set()
        # Shared by all choices: there may be 100,000 of them.
        pairs = [[(knob.name, value) for value in knob.values] for knob in self.knobs]
        for values in itertools.product(*pairs):
            choice = self.canonical(PlanChoice(values))
            if choice not in seen:
                seen.add(choice)
                yield choice

    def neighbours(self, choice: PlanChoice) -> tuple[PlanChoice, ...]:
        """Returns every choice that differs from this one in a single knob."""
        changed = (
            self.canonical(choice.but(knob.name, value)) for knob in self.knobs for value in knob.values
        )
        return tuple(other for other in dict.fromkeys(changed) if other != choice)

    def describe(self, choice: PlanChoice) -> str:
        """Returns the changes of a choice from the base plan, for a message."""
        base = set(self.base.values)
        changed = [f"{knob}={value}" for knob, value in choice.values if (knob, value) not in base]
        return " ".join(changed) or "the base plan"

    def settings(self, choice: PlanChoice) -> tuple[Setting, ...]:
        """Returns the chosen value of every knob.

        Raises:
            TuningError: The choice is not of this space.
        """
        values = choice.as_dict()
        missing = [knob.name for knob in self.knobs if knob.name not in values]
        if missing:
            raise TuningError(f"choice without {', '.join(missing)}: {choice}")
        return tuple(knob.setting(values[knob.name]) for knob in self.knobs)


def apply_settings(
    settings: tuple[Setting, ...], options: SessionOptionsRecord, providers: tuple[ProviderRecord, ...]
) -> tuple[SessionOptionsRecord, tuple[ProviderRecord, ...]]:
    """Returns a plan's options and providers with the settings of a choice on top."""
    attributes, entries, cuda = dict(options.attributes), dict(options.config_entries), dict[str, str]()
    for setting in settings:
        attributes |= setting.attributes
        entries |= setting.config_entries
        cuda |= setting.provider_options
    tuned = options._replace(attributes=attributes, config_entries=entries)
    return tuned, tuple(
        provider._replace(options={**provider.options, **cuda}) if provider.name == CUDA else provider
        for provider in providers
    )
