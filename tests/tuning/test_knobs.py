"""What cannot matter is not searched, and what is searched is known to that ONNX Runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given

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
from ortprep.tuning.knobs import MAX_INLINE_BYTES, ModelFeatures, find_space_problems
from ortprep.tuning.space import ATTRIBUTES, Options, Space
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


def but(features: ModelFeatures, **changes: object) -> ModelFeatures:
    return dataclasses.replace(features, **changes)  # type: ignore[arg-type]


def free_space() -> Space:
    return cuda_space(allowed=EVERYTHING_ALLOWED)


def all_options(space: Space) -> list[Options]:
    return [options for values in space.knobs.values() for options in values.values()]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("build", [cpu_space, cuda_space])
@pytest.mark.parametrize("features", [CONVOLUTIONS, TRANSFORMER], ids=["convolutions", "transformer"])
def test_every_option_of_every_knob_is_known_to_that_version_with_that_value(
    version: str, build: Callable[..., Space], features: ModelFeatures
) -> None:
    space = build(features, onnxruntime=version, allowed=EVERYTHING_ALLOWED)
    for options in all_options(space):
        entries = {name: value for name, value in options.items() if "." in name}
        attributes = {name: value for name, value in options.items() if name in ATTRIBUTES}
        others = {name: value for name, value in options.items() if name not in {*entries, *attributes}}
        assert check_session_config(entries, version=version) == ()
        assert check_attributes(attributes, version=version) == ()
        assert check_provider_options(CUDA, others, version=version) == ()


@given(spaces())
def test_every_knob_has_a_choice_and_the_base_sets_no_option_at_all(space: Space) -> None:
    for knob, values in space.knobs.items():
        assert len(values) > 1 or knob in ("form", "level")
    assert {"form", "level"} <= names(space)
    options, providers = SessionOptionsRecord("ORT_DISABLE_ALL"), (ProviderRecord(CUDA),)
    assert space.apply(space.base, options, providers) == (options, providers)


def test_a_model_to_which_everything_can_matter_has_every_knob() -> None:
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


def test_convolution_knobs_need_convolutions() -> None:
    assert names(cuda_space()) >= CONVOLUTION_KNOBS
    assert not CONVOLUTION_KNOBS & names(cuda_space(TRANSFORMER))
    assert "cudnn" in names(cuda_space(TRANSFORMER))
    assert "cudnn" not in names(cuda_space())


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose", "FusedConv", "NhwcConv", "QLinearConv"])
def test_a_fused_or_quantised_convolution_is_one_too(operator: str) -> None:
    assert names(cuda_space(but(CONVOLUTIONS, operators=(operator,)))) >= CONVOLUTION_KNOBS


@pytest.mark.parametrize(
    ("features", "allowed", "recorded"),
    [
        (CONVOLUTIONS, ("io_binding",), True),
        (CONVOLUTIONS, (), False),
        (but(CONVOLUTIONS, fixed_shapes=False), ("io_binding",), False),
        (but(CONVOLUTIONS, operators=("Conv", "Loop")), ("io_binding",), False),
        (but(CONVOLUTIONS, operators=("Conv", "If")), ("io_binding",), False),
        (but(CONVOLUTIONS, operators=("Conv", "Scan")), ("io_binding",), False),
    ],
)
def test_a_run_is_recorded_only_with_bound_inputs_fixed_shapes_and_no_control_flow(
    features: ModelFeatures, allowed: tuple[str, ...], recorded: bool
) -> None:
    assert ("cuda_graph" in names(cuda_space(features, allowed=allowed))) == recorded


@pytest.mark.parametrize("permission", ["tf32", "io_binding"])
def test_what_changes_answers_or_jobs_is_searched_only_if_allowed(permission: str) -> None:
    assert permission not in names(cuda_space())
    assert permission in names(cuda_space(allowed=(permission,)))


def test_the_slow_search_for_convolutions_is_tried_only_if_allowed() -> None:
    assert tuple(cuda_space().knobs["convolution_search"]) == ("exhaustive", "heuristic")
    assert "default" in cuda_space(allowed=("cudnn_default",)).knobs["convolution_search"]


def test_branches_run_side_by_side_only_where_there_are_any_and_processors_for_them() -> None:
    assert "execution" not in names(cpu_space(TRANSFORMER))
    assert "execution" not in names(cpu_space(cores=1))
    assert cpu_space(cores=2).knobs["execution"]["parallel"]["inter_op_num_threads"] == 2


def test_one_processor_leaves_nothing_to_share() -> None:
    space = cpu_space(cores=1)
    assert not {"threads", "spinning", "execution"} & names(space)
    assert tuple(space.knobs["prepacking"]) == ("on", "off")


@pytest.mark.parametrize(
    ("cores", "counts"),
    [(2, ("all", "1")), (3, ("all", "1")), (4, ("all", "2", "1")), (64, ("all", "32", "16", "1"))],
)
def test_thread_counts_are_all_half_a_quarter_and_one_each_once(cores: int, counts: tuple[str, ...]) -> None:
    assert tuple(cpu_space(cores=cores).knobs["threads"]) == counts


def test_an_option_that_an_older_version_lacks_is_not_searched() -> None:
    old = cpu_space(onnxruntime="1.23.2")
    known = {option.name for option in known_session_config("1.23.2")}
    assert "session.prepack.enable_parallel" not in known
    assert tuple(old.knobs["prepacking"]) == ("on", "off")
    assert "session.use_memory_mapped_ort_model" not in known
    assert tuple(old.knobs["form"]) == ("mapped", "inline", "prepacked")
    assert tuple(cpu_space().knobs["form"]) == ("mapped", "inline", "ort", "prepacked")
    assert {"reading_threads", "cudnn"}.isdisjoint(names(cuda_space(TRANSFORMER, onnxruntime="1.29.0")))


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
def test_an_option_that_the_user_has_set_is_not_searched(build: Callable[..., Space]) -> None:
    for option in {name for options in all_options(build(allowed=EVERYTHING_ALLOWED)) for name in options}:
        space = build(allowed=EVERYTHING_ALLOWED, fixed={option: "0"})
        assert not any(option in options for options in all_options(space))


@pytest.mark.parametrize("build", [cpu_space, cuda_space])
def test_whatever_the_user_has_set_every_plan_has_its_files(build: Callable[..., Space]) -> None:
    for option in OPTIONS:
        space = build(allowed=EVERYTHING_ALLOWED, fixed={option: "0"})
        assert {"form", "level"} <= names(space), option
        assert "mapped" in space.knobs["form"], option


@pytest.mark.parametrize("build", [cpu_space, cuda_space])
def test_weights_that_fit_no_single_file_are_not_put_into_one(build: Callable[..., Space]) -> None:
    assert {"inline", "ort"}.isdisjoint(
        tuple(build(but(CONVOLUTIONS, initializer_bytes=MAX_INLINE_BYTES + 1)).knobs["form"])
    )
    assert "inline" in build(but(CONVOLUTIONS, initializer_bytes=MAX_INLINE_BYTES)).knobs["form"]


@pytest.mark.parametrize("build", [cpu_space, cuda_space])
def test_a_model_shipped_as_it_is_has_one_form(build: Callable[..., Space]) -> None:
    space = build(levels=("source",))
    assert tuple(space.knobs["form"]) == ("mapped",)
    assert tuple(space.knobs["level"]) == ("source",)


def test_a_restriction_that_exists_nowhere_is_told_with_what_does() -> None:
    problems = find_space_problems({"banana": ("on",), "form": ("mapped", "zip"), "spinning": ("off",)})
    assert len(problems) == 2
    assert problems[0].startswith("unknown knob 'banana'; expected one of form, prepacking, level, ")
    assert problems[1] == "unknown value 'zip' of knob 'form'; expected one of mapped, inline, ort, prepacked"


@pytest.mark.parametrize("space", [cpu_space(), cuda_space(allowed=EVERYTHING_ALLOWED)])
def test_a_restriction_that_exists_somewhere_has_no_problem(space: Space) -> None:
    assert find_space_problems({knob: tuple(values)[-1:] for knob, values in space.knobs.items()}) == ()


def test_a_thread_that_the_user_leaves_alone_has_nobody_to_spin_or_prepack_with() -> None:
    space = cpu_space(fixed={"intra_op_num_threads": "1"})
    assert not {"threads", "spinning"} & names(space)
    assert tuple(space.knobs["prepacking"]) == ("on", "off")


def test_arranged_weights_are_not_saved_where_the_user_has_prepacking_off() -> None:
    assert "prepacked" not in cpu_space(fixed={"session.disable_prepacking": "1"}).knobs["form"]
    assert "prepacked" in cpu_space(fixed={"session.disable_prepacking": "0"}).knobs["form"]
