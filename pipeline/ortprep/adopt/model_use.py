"""How an application uses each of its models, and the sections of a spec that keep its options. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortprep.adopt.observation import (
    MAX_SMALL_SIZE,
    MAX_VALUES,
    FeedRecord,
    ModelRecord,
    Shapes,
    Value,
    merge_feeds,
    merge_limits,
)
from ortprep.init import ObservedInput
from ortprep.options import CUDA, Scalar, check_options
from ortprep.runtime.loading.session import CPU
from ortprep.stages.core.spec_fit import MIN_AUTO_SAMPLES

MAX_SHAPES = 4
"""Maximum number of sets of shapes in a spec: every one is verified, tuned and measured."""


@dataclass(frozen=True)
class ModelUse:
    """How an application uses one model.

    Attributes:
        model: The sessions whose options count: those with the most runs.
        loads: Number of sessions.
        runs: Number of runs of all sessions.
        shapes: Number of different sets of shapes that were kept apart.
        other_runs: Number of runs with other shapes than those.
        inputs: What is fed, by input name; empty if no session ran.
        excluded_shapes: Number of sets of shapes not in `inputs` since small inputs had other values there.
        other_options: Number of further sets of options that sessions of this model had.
    """

    model: ModelRecord
    loads: int
    runs: int
    shapes: int
    other_runs: int
    inputs: Mapping[str, ObservedInput]
    excluded_shapes: int
    other_options: int

    @property
    def shape_count(self) -> str:
        """Number of different sets of shapes, as far as it is known: `64 or more`."""
        return f"{self.shapes} or more" if self.other_runs else str(self.shapes)

    @property
    def runs_per_load(self) -> int:
        """Runs of one session, at least 1."""
        return max(1, round(self.runs / max(1, self.loads)))


def merge_uses(models: Sequence[ModelRecord], *, ids: Collection[str] = ()) -> ModelUse:
    """Returns how one model is used.

    Args:
        models: All that was observed of it; at least one.
        ids: Names of inputs that index a table: their values do not depend on shapes.
    """
    feeds = _merge_feeds(feed for record in models for feed in record.feeds)
    chosen, excluded_shapes = _choose_feeds(feeds, ids)
    runs = sum(record.runs for record in models)
    inputs = {}
    for name in chosen[0].shapes if chosen else ():
        values = _all_values(feeds, name) if name in ids else _common_values(chosen, name)
        limits = None if values else merge_limits(feeds, name)
        inputs[name] = ObservedInput(tuple(feed.shapes[name] for feed in chosen), limits, values or None)
    options = {repr((one.options, one.providers, one.obtained, one.obstacle)) for one in models}
    return ModelUse(
        model=max(models, key=lambda record: (record.runs, record.loads)),
        loads=sum(record.loads for record in models),
        runs=runs,
        shapes=len(feeds),
        other_runs=runs - sum(feed.runs for feed in feeds),
        inputs=inputs,
        excluded_shapes=excluded_shapes,
        other_options=len(options) - 1,
    )


def _merge_feeds(feeds: Iterable[FeedRecord]) -> list[FeedRecord]:
    """Returns the runs by shapes, the most frequent first."""
    merged: dict[Shapes, FeedRecord] = {}
    for feed in feeds:
        key = tuple(sorted(feed.shapes.items()))
        merged[key] = merge_feeds(merged[key], feed) if key in merged else feed
    return sorted(merged.values(), key=lambda feed: -feed.runs)


def _choose_feeds(feeds: Sequence[FeedRecord], ids: Collection[str]) -> tuple[list[FeedRecord], int]:
    """Returns the sets of shapes for a spec, and the number of those that do not suit them.

    The spec gets the most frequent ones, and in any case the largest.

    A spec has one set of values per input, for all its shapes. So a set of shapes joins only if every input
    with few values, a length or a sample rate, was seen there with a value of those before.
    """
    described = [feed for feed in feeds if feed.shapes] or feeds
    fitting = [feed for feed in described if feed.shapes.keys() == described[0].shapes.keys()]
    frequent = fitting[: MAX_SHAPES - 1]
    rest = sorted(fitting[MAX_SHAPES - 1 :], key=_count_elements, reverse=True)
    chosen: list[FeedRecord] = []
    excluded = 0
    for feed in (*frequent, *rest):
        together = [*chosen, feed]
        if all(_common_values(together, name) is not None for name in feed.shapes if name not in ids):
            chosen = together
        else:
            excluded += 1
        if len(chosen) == MAX_SHAPES:
            break
    return chosen, excluded


def _count_elements(feed: FeedRecord) -> int:
    return sum(map(math.prod, feed.shapes.values()))


def _common_values(feeds: Sequence[FeedRecord], name: str) -> tuple[Value, ...] | None:
    """Returns the values of an input that suit all these shapes; () if they are many, None if none does."""
    known = [values for feed in feeds if (values := feed.values.get(name))]
    if not known or any(math.prod(feed.shapes[name]) > MAX_SMALL_SIZE for feed in feeds):
        return ()
    common = tuple(value for value in known[0] if all(value in others for others in known))
    # What a number with a fraction may be seldom depends on a shape.
    return common or (() if isinstance(known[0][0], float) else None)


def _all_values(feeds: Sequence[FeedRecord], name: str) -> tuple[Value, ...]:
    """Returns the values of an input under any shape; () if they are many."""
    values = {value for feed in feeds for value in feed.values.get(name, ())}
    is_known = all(feed.values.get(name) for feed in feeds if name in feed.shapes)
    return tuple(sorted(values)) if is_known and len(values) <= MAX_VALUES else ()


_PLACED_BY_JOB = frozenset({"device_id", "user_compute_stream"})
"""Provider options that belong to one process, not to a bundle."""


@dataclass(frozen=True)
class SpecOptions:
    """What a spec says beside its source and inputs.

    Attributes:
        sections: Sections of the spec by name: `targets`, `runtime`, `tune`.
        left_out: Options of the application that a spec cannot keep, one phrase each.
    """

    sections: Mapping[str, Any]
    left_out: tuple[str, ...]

    def with_samples(self, pattern: str, count: int, convert: Mapping[str, Any] | None) -> SpecOptions:
        """Returns the options with real inputs, and with a conversion if there are enough of them.

        Args:
            pattern: The glob of their files.
            count: Number of files.
            convert: Section `convert`; None for none.
        """
        sections, left_out = dict(self.sections), self.left_out
        if count:
            sections["samples"] = pattern
        if convert is not None and count >= MIN_AUTO_SAMPLES:
            sections["convert"] = convert
        elif convert is not None:
            left_out += (f"precision: expected at least {MIN_AUTO_SAMPLES} runs with arrays, got {count}",)
        return SpecOptions(sections, left_out)


def options_of(use: ModelUse, *, version: str) -> SpecOptions:
    """Returns the sections that make a bundle keep an application's options.

    What stands in `runtime` is not searched by `tune`.

    Args:
        use: How the application uses the model.
        version: Version of ONNX Runtime that the spec is checked against.
    """
    left_out: list[str] = []
    sections = {
        "targets": ["cuda" if CUDA in use.model.obtained else "cpu"],
        "runtime": _runtime_section(use, version, left_out),
        "tune": {"runs_per_load": use.runs_per_load} if use.runs else {},
    }
    if use.excluded_shapes:
        left_out.append(f"sets of shapes with other values of small inputs: {use.excluded_shapes}")
    others = [name for name in use.model.obtained if name not in (CPU, CUDA)]
    left_out += [f"{name}: bundles support only CPU and CUDA" for name in others]
    if use.model.obstacle is not None:
        left_out.append(f"{use.model.obstacle}, so `ortprep run` leaves its session as it is")
    return SpecOptions({name: section for name, section in sections.items() if section}, tuple(left_out))


def _runtime_section(use: ModelUse, version: str, left_out: list[str]) -> dict[str, Any]:
    """Returns the spec's `runtime` section; adds to `left_out` what a spec cannot set."""
    options = use.model.options

    def keep(table: str, chosen: Mapping[str, Scalar]) -> dict[str, Scalar]:
        problems = {
            name: check_options(table, {name: value}, version=version) for name, value in chosen.items()
        }
        left_out.extend(f"{name}={chosen[name]}: {texts[0]}" for name, texts in problems.items() if texts)
        return {name: value for name, value in chosen.items() if not problems[name]}

    section: dict[str, Any] = keep("attribute", options.attributes)
    section["session_config"] = keep("session", options.config_entries)
    for provider in use.model.providers:
        own = {name: value for name, value in provider.options.items() if name not in _PLACED_BY_JOB}
        if provider.name == CUDA and CUDA in use.model.obtained:
            section["cuda"] = keep(CUDA, own)
        elif own and provider.name != CPU:
            left_out.append(f"options of {provider.name}: {', '.join(own)}")
    return {name: value for name, value in section.items() if value != {}}
