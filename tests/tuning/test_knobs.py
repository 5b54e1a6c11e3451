"""What cannot matter is not searched, and what is searched is known to that ONNX Runtime."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given

from ortprep.bundle.model_facts import ModelFacts
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.options import (
    CUDA,
    check_attributes,
    check_provider_options,
    check_session_config,
    known_attributes,
    known_provider_options,
    known_session_config,
)
from ortprep.tuning.space import ATTRIBUTES, MAX_INLINE_BYTES, Options, Space, find_space_problems
from tests.tuning.builders import (
    CONVOLUTIONS,
    EVERYTHING_ALLOWED,
    TRANSFORMER,
    VERSIONS,
    cpu_space,
    cuda_space,
    names,
    spaces,
)

CONVOLUTION_KNOBS = {"convolution_search", "workspace", "channels_last", "bias_fusion", "pad_1d"}


def but(facts: ModelFacts, **changes: Any) -> ModelFacts:
    return dataclasses.replace(facts, **changes)


def free_space() -> Space:
    return cuda_space(allowed=EVERYTHING_ALLOWED)


def all_options(space: Space) -> list[Options]:
    return [options for values in space.knobs.values() for options in values.values()]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("build", [cpu_space, cuda_space])
@pytest.mark.parametrize("facts", [CONVOLUTIONS, TRANSFORMER], ids=["convolutions", "transformer"])
def test_every_option_of_every_knob_is_known_to_that_version_with_that_value(version, build, facts):
    space = build(facts, onnxruntime=version, allowed=EVERYTHING_ALLOWED)
    for options in all_options(space):
        entries = {name: value for name, value in options.items() if "." in name}
        attributes = {name: value for name, value in options.items() if name in ATTRIBUTES}
        others = {name: value for name, value in options.items() if name not in {*entries, *attributes}}
        assert check_session_config(entries, version=version) == ()
        assert check_attributes(attributes, version=version) == ()
        assert check_provider_options(CUDA, others, version=version) == ()


@given(spaces())
def test_every_knob_has_a_choice_and_the_base_sets_no_option_at_all(space):
    for knob, values in space.knobs.items():
        assert len(values) > 1 or knob in ("form", "level")
    assert {"form", "level"} <= names(space)
    options, providers = SessionOptionsRecord("ORT_DISABLE_ALL"), (ProviderRecord(CUDA),)
    assert space.apply(space.base, options, providers) == (options, providers)


def test_a_model_to_which_everything_can_matter_has_every_knob():
    assert names(cpu_space()) == {
        "form",
        "level",
        "prepacking",
        "threads",
        "spinning",
        "execution",
        "memory_arena",
        "memory_pattern",
        "device_allocator",
    }
    assert {"cuda_graph", "io_binding", "tf32", "reading_threads", *CONVOLUTION_KNOBS} <= names(free_space())


FORMS, ON_OFF, OFF_ON = ("mapped", "inline", "ort", "prepacked"), ("on", "off"), ("off", "on")
BOUND, SLOW = ("io_binding",), ("cudnn_default",)
LARGE = but(CONVOLUTIONS, initializer_bytes=MAX_INLINE_BYTES + 1)


@pytest.mark.parametrize(
    ("space", "knob", "values"),
    [
        # Convolutions, fused and quantised ones too.
        *((cuda_space(TRANSFORMER), knob, ()) for knob in sorted(CONVOLUTION_KNOBS)),
        *(
            (cuda_space(but(CONVOLUTIONS, operators={f"{kind}Conv": 1})), "channels_last", OFF_ON)
            for kind in ("", "Fused", "Nhwc", "QLinear")
        ),
        (cuda_space(TRANSFORMER), "cudnn", ON_OFF),
        (cuda_space(), "cudnn", ()),
        (cuda_space(but(CONVOLUTIONS, has_1d_convolutions=False)), "pad_1d", ()),
        # What changes answers or jobs, or can be very slow, only if it is allowed.
        (cuda_space(), "tf32", ()),
        (cuda_space(allowed=("tf32",)), "tf32", ON_OFF),
        (cuda_space(), "io_binding", ()),
        (cuda_space(allowed=BOUND), "io_binding", OFF_ON),
        (cuda_space(), "convolution_search", ("exhaustive", "heuristic")),
        (
            cuda_space(allowed=SLOW),
            "convolution_search",
            ("exhaustive", "heuristic", "default"),
        ),
        # Recorded runs need bound inputs, fixed shapes and no control flow.
        (cuda_space(allowed=BOUND), "cuda_graph", OFF_ON),
        (cuda_space(), "cuda_graph", ()),
        (cuda_space(fixed_shapes=False, allowed=BOUND), "cuda_graph", ()),
        *(
            (cuda_space(but(CONVOLUTIONS, operators={"Conv": 1, flow: 1}), allowed=BOUND), "cuda_graph", ())
            for flow in ("If", "Loop", "Scan")
        ),
        # Threads: all, half, a quarter and one, each once; with one there is nobody to share with.
        (cpu_space(cores=3), "threads", ("all", "1")),
        (cpu_space(cores=4), "threads", ("all", "2", "1")),
        (cpu_space(cores=64), "threads", ("all", "32", "16", "1")),
        (cpu_space(TRANSFORMER), "execution", ()),
        (cpu_space(cores=2), "execution", ("sequential", "parallel")),
        *((cpu_space(cores=1), knob, ()) for knob in ("threads", "spinning", "execution")),
        (cpu_space(cores=1), "prepacking", ON_OFF),
        (cpu_space(fixed={"intra_op_num_threads": "1"}), "spinning", ()),
        (cpu_space(fixed={"intra_op_num_threads": "1"}), "prepacking", ON_OFF),
        (cpu_space(TRANSFORMER), "memory_pattern", ()),
        # What an older version lacks.
        (cpu_space(), "form", FORMS),
        (cpu_space(onnxruntime="1.23.2"), "form", ("mapped", "inline", "prepacked")),
        (cpu_space(onnxruntime="1.23.2"), "prepacking", ON_OFF),
        (cuda_space(TRANSFORMER, onnxruntime="1.29.0"), "cudnn", ()),
        (cuda_space(onnxruntime="1.29.0"), "reading_threads", ()),
        # Forms: large weights fit no single file; a source has one form; saved copies need prepacking.
        (cpu_space(LARGE), "form", ("mapped", "prepacked")),
        (cuda_space(LARGE), "form", ("mapped",)),
        (cpu_space(but(LARGE, initializer_bytes=MAX_INLINE_BYTES)), "form", FORMS),
        (cpu_space(levels=("source",)), "form", ("mapped",)),
        (cuda_space(levels=("source",)), "form", ("mapped",)),
        (cpu_space(fixed={"session.disable_prepacking": "1"}), "form", ("mapped", "inline", "ort")),
        (cpu_space(fixed={"session.disable_prepacking": "0"}), "form", FORMS),
    ],
)
def test_a_knob_has_the_values_that_can_matter(space, knob, values):
    assert tuple(space.knobs.get(knob, ())) == values


OPTIONS = {
    option.name
    for option in (
        *known_session_config("1.31.1"),
        *known_attributes("1.31.1"),
        *known_provider_options(CUDA, "1.31.1"),
    )
    if option.owner is None
}


@pytest.mark.parametrize("build", [cpu_space, cuda_space])
def test_an_option_that_the_user_has_set_is_not_searched(build):
    for option in {name for options in all_options(build(allowed=EVERYTHING_ALLOWED)) for name in options}:
        space = build(allowed=EVERYTHING_ALLOWED, fixed={option: "0"})
        assert not any(option in options for options in all_options(space))


@pytest.mark.parametrize("build", [cpu_space, cuda_space])
def test_whatever_the_user_has_set_every_plan_has_its_files(build):
    for option in OPTIONS:
        space = build(allowed=EVERYTHING_ALLOWED, fixed={option: "0"})
        assert {"form", "level"} <= names(space), option
        assert "mapped" in space.knobs["form"], option


def test_a_restriction_that_exists_nowhere_is_told_with_what_does():
    problems = find_space_problems({"banana": ("on",), "form": ("mapped", "zip"), "spinning": ("off",)})
    assert len(problems) == 2
    assert problems[0].startswith("unknown knob 'banana'; expected one of form, prepacking, level, ")
    assert problems[1] == "unknown value 'zip' of knob 'form'; expected one of mapped, inline, ort, prepacked"


@pytest.mark.parametrize("space", [cpu_space(), cuda_space(allowed=EVERYTHING_ALLOWED)])
def test_a_restriction_that_exists_somewhere_has_no_problem(space):
    assert find_space_problems({knob: tuple(values)[-1:] for knob, values in space.knobs.items()}) == ()
