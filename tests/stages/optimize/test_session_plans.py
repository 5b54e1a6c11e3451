from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.session_record import ProviderRecord, SessionPlan
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.spec.models import RuntimeSpec
from ortprep.stages.optimize.session_plans import (
    HARDWARE_BOUND_OPTIMIZERS,
    Step,
    loading_options,
    loading_providers,
    plan_steps,
    saving_plan,
    step_options,
)

STEP = Step("all", "ORT_ENABLE_ALL", ("ConvAddFusion",))
DISABLED = "optimization.disable_specified_optimizers"


def plan_saving(runtime: RuntimeSpec, variant: str = "cpu", step: Step = STEP) -> SessionPlan:
    plan = saving_plan(
        runtime, variant, step, source=Path("/in/net.onnx"), model=Path("/out/net_optimized.onnx")
    )
    assert plan is not None
    return plan


def test_jobs_get_the_options_the_user_asked_for():
    runtime = RuntimeSpec(
        intra_op_num_threads=3,
        enable_cpu_mem_arena=False,
        execution_mode="ORT_PARALLEL",
        session_config={"session.intra_op.allow_spinning": False},
    )
    options = loading_options(runtime, level="ORT_DISABLE_ALL")
    assert options.attributes == {
        "intra_op_num_threads": 3,
        "enable_cpu_mem_arena": False,
        "execution_mode": "ORT_PARALLEL",
    }
    assert options.config_entries == {"session.intra_op.allow_spinning": "0"}


def test_cuda_options_are_for_the_cuda_variant_alone():
    runtime = RuntimeSpec(cuda={"use_tf32": 0})
    assert loading_providers(runtime, "cuda") == (
        ProviderRecord(CUDA, {"use_tf32": "0"}),
        ProviderRecord(CPU),
    )
    for variant in ("cpu", "portable"):
        assert loading_providers(runtime, variant) == (ProviderRecord(CPU),)


def test_cpu_is_not_named_where_the_user_forbids_it():
    runtime = RuntimeSpec(session_config={"session.disable_cpu_ep_fallback": "1"})
    assert [provider.name for provider in loading_providers(runtime, "cuda")] == [CUDA]


def test_of_the_cuda_options_only_the_device_reaches_the_saving_session():
    plan = plan_saving(RuntimeSpec(cuda={"device_id": 1, "prefer_nhwc": 1}), "cuda")
    assert plan.providers[0] == ProviderRecord(CUDA, {"device_id": "1"})


def test_the_data_file_is_named_relative_to_the_model():
    entries = plan_saving(RuntimeSpec()).session_options.config_entries
    name = entries["session.optimized_model_external_initializers_file_name"]
    assert name == "net_optimized.onnx.data"


def test_optimizers_are_left_out_by_step_and_by_user_together_separated_by_semicolons():
    plan = plan_saving(RuntimeSpec(session_config={DISABLED: "GeluFusionL2;ConvAddFusion"}))
    assert plan.session_options.config_entries[DISABLED] == "ConvAddFusion;GeluFusionL2"


def test_what_the_user_leaves_out_is_left_out_of_loads_that_optimise():
    for level, disabled in (("ORT_DISABLE_ALL", None), ("ORT_ENABLE_ALL", "ConvAddFusion")):
        options = step_options(RuntimeSpec(), replace(STEP, loading_level=level))
        assert options.graph_optimization_level == level
        assert options.config_entries.get(DISABLED) == disabled


def test_saving_does_not_prepack_unless_the_packed_weights_are_wanted():
    wanted = RuntimeSpec(session_config={"session.save_external_prepacked_constant_initializers": "1"})
    assert plan_saving(RuntimeSpec()).session_options.config_entries["session.disable_prepacking"] == "1"
    assert "session.disable_prepacking" not in plan_saving(wanted).session_options.config_entries


# The ladder

VARIANTS = st.sampled_from(["cpu", "cuda", "portable"])
LEVELS = st.sampled_from(["all", "extended", "basic"])
OPTIMIZERS = st.lists(st.sampled_from(["ConvAddFusion", "NchwcTransformer", "NhwcTransformer"])).map(tuple)


def test_the_whole_ladder_goes_from_everything_to_the_source():
    assert [step.name for step in plan_steps("cpu", level="all")] == [
        "all",
        "all-reduced",
        "extended",
        "basic",
        "source",
    ]


def test_the_portable_variant_never_goes_beyond_onnx_operators():
    steps = plan_steps("portable", level="all")
    assert {step.level for step in steps} == {"ORT_ENABLE_BASIC", None}


@given(level=LEVELS)
def test_loads_of_the_portable_variant_optimise_it_as_far_as_the_user_lets_them(level):
    first, second, last = plan_steps("portable", level=level)
    assert first.loading_level == f"ORT_ENABLE_{level.upper()}"
    assert second.loading_level == "ORT_DISABLE_ALL"
    assert last.loading_level == "ORT_ENABLE_ALL"


@given(variant=st.sampled_from(["cpu", "cuda"]), level=LEVELS)
def test_loads_of_a_target_s_graph_optimise_the_source_alone(variant, level):
    *written, source = plan_steps(variant, level=level)
    assert {step.loading_level for step in written} == {"ORT_DISABLE_ALL"}
    assert source.loading_level == "ORT_ENABLE_ALL"


def test_the_reduced_step_leaves_out_what_binds_a_graph_to_hardware():
    reduced = plan_steps("cpu", level="all", disabled_optimizers=("ConvAddFusion",))[1]
    assert set(reduced.disabled_optimizers) == {"ConvAddFusion", *HARDWARE_BOUND_OPTIMIZERS}


@given(variant=VARIANTS, level=LEVELS, disabled=OPTIMIZERS)
def test_the_source_is_always_the_last_resort(variant, level, disabled):
    steps = plan_steps(variant, level=level, disabled_optimizers=disabled)
    assert steps[-1].level is None
    assert all(step.level is not None for step in steps[:-1])


@given(variant=VARIANTS, level=LEVELS, disabled=OPTIMIZERS)
def test_what_the_user_leaves_out_is_left_out_of_every_step(variant, level, disabled):
    for step in plan_steps(variant, level=level, disabled_optimizers=disabled)[:-1]:
        assert set(disabled) <= set(step.disabled_optimizers)


@given(variant=VARIANTS, level=LEVELS, disabled=OPTIMIZERS)
def test_no_step_is_tried_twice(variant, level, disabled):
    steps = plan_steps(variant, level=level, disabled_optimizers=disabled)
    tried = [(step.level, frozenset(step.disabled_optimizers), step.loading_level) for step in steps]
    assert len(set(tried)) == len(tried)
