"""How an application uses each of its models, and the sections of a spec that keep its options. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortprep.adopt.observation import (
    MAX_SMALL_SIZE,
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
        inputs: What is fed, by input name; empty if no session ran.
    """

    model: ModelRecord
    loads: int
    runs: int
    shapes: int
    inputs: Mapping[str, ObservedInput]

    @property
    def runs_per_load(self) -> int:
        """Runs of one session, at least 1."""
        return max(1, round(self.runs / max(1, self.loads)))


def merge_uses(models: Sequence[ModelRecord]) -> ModelUse:
    """Returns how one model is used, of all that was observed of it: at least one record."""
    feeds = _merge_feeds(feed for record in models for feed in record.feeds)
    chosen = _choose_feeds(feeds)
    inputs = {}
    for name in chosen[0].shapes if chosen else ():
        values = _common_values(chosen, name)
        limits = None if values else merge_limits(feeds, name)
        inputs[name] = ObservedInput(tuple(feed.shapes[name] for feed in chosen), limits, values or None)
    return ModelUse(
        model=max(models, key=lambda record: (record.runs, record.loads)),
        loads=sum(record.loads for record in models),
        runs=sum(record.runs for record in models),
        shapes=len(feeds),
        inputs=inputs,
    )


def _merge_feeds(feeds: Iterable[FeedRecord]) -> list[FeedRecord]:
    """Returns the runs by shapes, the most frequent first."""
    merged: dict[Shapes, FeedRecord] = {}
    for feed in feeds:
        key = tuple(sorted(feed.shapes.items()))
        merged[key] = merge_feeds(merged[key], feed) if key in merged else feed
    return sorted(merged.values(), key=lambda feed: -feed.runs)


def _choose_feeds(feeds: Sequence[FeedRecord]) -> list[FeedRecord]:
    """Returns the sets of shapes for a spec: the most frequent ones, and the largest.

    A spec has one set of values per input, for all its shapes. An input with few values, as a length or a
    sample rate, may have other values with other shapes: then only the most frequent shapes are returned.
    """
    described = [feed for feed in feeds if feed.shapes] or feeds
    fitting = [feed for feed in described if feed.shapes.keys() == described[0].shapes.keys()]
    rest = sorted(fitting[MAX_SHAPES - 1 :], key=_count_elements, reverse=True)
    chosen = [*fitting[: MAX_SHAPES - 1], *rest[:1]]
    suit = all(_common_values(chosen, name) is not None for name in (chosen[0].shapes if chosen else ()))
    return chosen if suit else chosen[:1]


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


_PLACED_BY_JOB = frozenset({"device_id", "user_compute_stream"})
"""Provider options that belong to one process, not to a bundle."""


def options_of(use: ModelUse, *, version: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the sections that make a bundle keep an application's options, and what a spec cannot keep.

    What stands in `runtime` is not searched by `tune`.

    Args:
        use: How the application uses the model.
        version: Version of ONNX Runtime that the spec is checked against.

    Returns:
        Sections of the spec by name: `targets`, `runtime`, `tune`; and a phrase for each option left out.
    """
    left_out: list[str] = []
    sections = {
        "targets": ["cuda" if CUDA in use.model.obtained else "cpu"],
        "runtime": _runtime_section(use, version, left_out),
        "tune": {"runs_per_load": use.runs_per_load} if use.runs else {},
    }
    if use.shapes > 1 and {len(one.shapes) for one in use.inputs.values()} == {1}:
        left_out.append("other shapes, seen with other inputs or with other values of small inputs")
    others = [name for name in use.model.obtained if name not in (CPU, CUDA)]
    left_out += [f"{name}: bundles support only CPU and CUDA" for name in others]
    if use.model.obstacle is not None:
        left_out.append(f"{use.model.obstacle}, so `ortprep run` leaves its session as it is")
    return {name: section for name, section in sections.items() if section}, left_out


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
