from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ortprep.stages.optimize.session_plans import HARDWARE_BOUND_OPTIMIZERS, plan_ladder

VARIANTS = st.sampled_from(["cpu", "cuda", "portable"])
LEVELS = st.sampled_from(["all", "extended", "basic"])
OPTIMIZERS = st.lists(st.sampled_from(["ConvAddFusion", "NchwcTransformer", "NhwcTransformer"])).map(tuple)


def test_the_whole_ladder_goes_from_everything_to_the_source() -> None:
    assert [step.name for step in plan_ladder("cpu", level="all")] == [
        "all",
        "all-reduced",
        "extended",
        "basic",
        "source",
    ]


def test_the_portable_variant_never_goes_beyond_onnx_operators() -> None:
    steps = plan_ladder("portable", level="all")
    assert {step.level for step in steps} == {"ORT_ENABLE_BASIC", None}


@given(level=LEVELS)
def test_loads_of_the_portable_variant_optimise_it_as_far_as_the_user_lets_them(level: str) -> None:
    first, second, last = plan_ladder("portable", level=level)
    assert first.loading_level == f"ORT_ENABLE_{level.upper()}"
    assert second.loading_level == "ORT_DISABLE_ALL"
    assert last.loading_level == "ORT_ENABLE_ALL"


@given(variant=st.sampled_from(["cpu", "cuda"]), level=LEVELS)
def test_loads_of_a_target_s_graph_optimise_the_source_alone(variant: str, level: str) -> None:
    *written, source = plan_ladder(variant, level=level)
    assert {step.loading_level for step in written} == {"ORT_DISABLE_ALL"}
    assert source.loading_level == "ORT_ENABLE_ALL"


def test_the_reduced_step_leaves_out_what_binds_a_graph_to_hardware() -> None:
    reduced = plan_ladder("cpu", level="all", disabled_optimizers=("ConvAddFusion",))[1]
    assert set(reduced.disabled_optimizers) == {"ConvAddFusion", *HARDWARE_BOUND_OPTIMIZERS}


@given(variant=VARIANTS, level=LEVELS, disabled=OPTIMIZERS)
def test_the_source_is_always_the_last_resort(variant: str, level: str, disabled: tuple[str, ...]) -> None:
    steps = plan_ladder(variant, level=level, disabled_optimizers=disabled)
    assert steps[-1].level is None
    assert all(step.level is not None for step in steps[:-1])


@given(variant=VARIANTS, level=LEVELS, disabled=OPTIMIZERS)
def test_what_the_user_leaves_out_is_left_out_of_every_step(
    variant: str, level: str, disabled: tuple[str, ...]
) -> None:
    for step in plan_ladder(variant, level=level, disabled_optimizers=disabled)[:-1]:
        assert set(disabled) <= set(step.disabled_optimizers)


@given(variant=VARIANTS, level=LEVELS, disabled=OPTIMIZERS)
def test_no_step_is_tried_twice(variant: str, level: str, disabled: tuple[str, ...]) -> None:
    steps = plan_ladder(variant, level=level, disabled_optimizers=disabled)
    tried = [(step.level, frozenset(step.disabled_optimizers), step.loading_level) for step in steps]
    assert len(set(tried)) == len(tried)
