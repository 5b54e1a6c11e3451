"""Spaces of models that differ in what can matter to them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

from ortprep.bundle.model_facts import ModelFacts, ModelInterface
from ortprep.stages.optimize.graph_writer import NCHWC_DOMAIN
from ortprep.tuning.objective import Objective
from ortprep.tuning.space import Conditions, PlanChoice, Space, build_space

VERSIONS = (
    "1.23.2", "1.24.4", "1.25.1", "1.26.0", "1.27.0", "1.28.0", "1.29.0", "1.30.0", "1.31.0", "1.31.1",
)  # fmt: skip
"""One ONNX Runtime of every minor version the tables of options describe, and the last."""


def per_load(runs: int, **limits: Any) -> Objective:
    """Returns the objective of a job that runs its session so often."""
    return Objective(runs_per_load=runs, **limits)


INTERFACE = ModelInterface((), (), {}, external=False)


def facts_of(*operators: str, initializer_bytes: int, **facts: Any) -> ModelFacts:
    return ModelFacts(INTERFACE, {"": 17}, 8, dict.fromkeys(operators, 1), initializer_bytes, {}, **facts)


CONVOLUTIONS = facts_of("Conv", "Gemm", "Relu", f"{NCHWC_DOMAIN}.Conv", initializer_bytes=100_000_000)
"""A model to which everything can matter."""

TRANSFORMER = facts_of("Attention", "MatMul", "SkipLayerNormalization", initializer_bytes=400_000_000)
"""A model of which each sample has shapes of its own."""

SERVER = Conditions("cpu", "1.31.1", cores=8)
GPU = Conditions("cuda", "1.31.1", cores=8)


def cpu_space(facts: ModelFacts = CONVOLUTIONS, **conditions: Any) -> Space:
    conditions = {"fixed_shapes": facts is not TRANSFORMER, **conditions}
    return build_space(facts, dataclasses.replace(SERVER, **conditions))


def cuda_space(facts: ModelFacts = CONVOLUTIONS, **conditions: Any) -> Space:
    conditions = {"fixed_shapes": facts is not TRANSFORMER, **conditions}
    return build_space(facts, dataclasses.replace(GPU, **conditions))


def restrict(space: Space, wanted: Mapping[str, Iterable[str]]) -> Space:
    """Returns a space with only those values of some knobs; the first value becomes the base."""
    limited = {knob: {value: space.knobs[knob][value] for value in values} for knob, values in wanted.items()}
    return dataclasses.replace(space, knobs={**space.knobs, **limited})


def choices_of(space: Space) -> Iterator[PlanChoice]:
    """Yields every choice that differs from the others, once."""
    pairs = [[(knob, value) for value in values] for knob, values in space.knobs.items()]
    seen = set()
    for combination in itertools.product(*pairs):
        choice = space.canonical(PlanChoice(combination))
        if choice not in seen:
            seen.add(choice)
            yield choice


def names(space: Space) -> set[str]:
    return set(space.knobs)


def plan(space: Space, **values: str) -> PlanChoice:
    """Returns the base with other values of some knobs."""
    choice = space.base
    for knob, value in values.items():
        assert value in space.knobs[knob]
        choice = choice.but(knob, value)
    return space.canonical(choice)


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Every space that a model, a machine and a user can lead to."""
    facts = facts_of(
        *draw(st.sets(st.sampled_from(("Conv", "FusedConv", "MatMul", "LSTM", "If", "Loop")), max_size=4)),
        initializer_bytes=draw(st.sampled_from((0, 10**6, 1_900_000_000, 1_900_000_001, 10**11))),
    )
    conditions = Conditions(
        target=draw(st.sampled_from(("cpu", "cuda"))),
        onnxruntime=draw(st.sampled_from(VERSIONS)),
        cores=draw(st.sampled_from((1, 2, 3, 4, 8, 64))),
        fixed_shapes=draw(st.booleans()),
        is_source=draw(st.booleans()),
    )
    return build_space(facts, conditions)


@st.composite
def restricted_spaces(draw: st.DrawFn) -> Space:
    """The same, some knobs with fewer values and in another order."""
    space = draw(spaces())
    wanted = {}
    for knob in draw(st.lists(st.sampled_from(list(space.knobs)), unique=True)):
        wanted[knob] = draw(st.lists(st.sampled_from(list(space.knobs[knob])), min_size=1, unique=True))
    return restrict(space, wanted)


@st.composite
def raw_choices(draw: st.DrawFn, space: Space) -> PlanChoice:
    """A value for every knob, whatever comes to the same."""
    return PlanChoice(
        tuple((knob, draw(st.sampled_from(list(values)))) for knob, values in space.knobs.items())
    )
