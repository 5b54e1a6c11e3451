from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.children.probe import ProbeResult
from ortprep.errors import StageError
from ortprep.options import CUDA
from ortprep.tuning.objective import Trial
from ortprep.tuning.space import DEFAULT, Options, PlanChoice, Space, restrict
from tests.tuning.builders import (
    choices_of,
    cpu_space,
    cuda_space,
    per_load,
    plan,
    raw_choices,
    restricted_spaces,
    spaces,
)


def changes(one: PlanChoice, other: PlanChoice) -> set[str]:
    return {name for (name, value), (_, was) in zip(one.values, other.values, strict=True) if value != was}


@given(st.data())
def test_a_canonical_choice_is_its_own_canonical_choice(data):
    space = data.draw(restricted_spaces())
    choice = space.canonical(data.draw(raw_choices(space)))
    assert space.canonical(choice) == choice


@given(st.data())
def test_a_canonical_choice_is_of_the_space(data):
    space = data.draw(restricted_spaces())
    choice = space.canonical(data.draw(raw_choices(space)))
    assert [knob for knob, _ in choice.values] == list(space.knobs)
    assert all(value in space.knobs[knob] for knob, value in choice.values)


@given(spaces())
def test_the_bases_neighbours_differ_from_it_in_one_knob_and_are_all_there_are(space):
    neighbours = space.neighbours(space.base)
    assert len(set(neighbours)) == len(neighbours)
    # A recorded run takes its binding along.
    assert all(len(changes(choice, space.base) - {"io_binding"}) <= 1 for choice in neighbours)
    assert all(space.canonical(choice) == choice for choice in neighbours)
    single = {space.base.but(knob, value) for knob, values in space.knobs.items() for value in values}
    assert set(neighbours) >= {choice for choice in single if space.canonical(choice) == choice} - {
        space.base
    }


@given(st.data())
def test_any_plans_neighbours_are_what_one_changed_knob_comes_to(data):
    space = data.draw(restricted_spaces())
    choice = space.canonical(data.draw(raw_choices(space)))
    neighbours = space.neighbours(choice)
    assert choice not in neighbours
    assert len(set(neighbours)) == len(neighbours)
    single = {choice.but(knob, value) for knob, values in space.knobs.items() for value in values}
    assert set(neighbours) == {space.canonical(other) for other in single} - {choice}


def test_a_restricted_knob_has_the_named_values_and_the_first_of_them_is_the_base():
    space = restrict(cpu_space(), {"form": ("prepacked", "mapped"), "threads": ("1",)})
    assert tuple(space.knobs["form"]) == ("prepacked", "mapped")
    assert space.base["form"] == "prepacked"
    assert space.base["threads"] == "1"
    assert {choice["threads"] for choice in space.neighbours(space.base)} == {"1"}
    assert space.knobs["level"] == cpu_space().knobs["level"]


def test_a_knob_that_does_not_matter_here_may_be_restricted_all_the_same():
    assert restrict(cpu_space(), {"cudnn": ("off",)}) == cpu_space()


def test_any_number_of_threads_may_be_asked_for():
    space = restrict(cpu_space(), {"threads": ("3",)})
    assert space.knobs["threads"] == {"3": {"intra_op_num_threads": 3}}


def test_a_restriction_to_nothing_that_is_here_is_told_with_what_is():
    with pytest.raises(StageError, match="no value of form is left to search\n  expected one of mapped"):
        restrict(cpu_space(), {"form": ("zip",)})


def test_one_thread_never_spins_and_prepacks_alone():
    space = cpu_space()
    assert plan(space, threads="1", spinning="off") == plan(space, threads="1")
    assert plan(space, threads="1", prepacking="parallel") == plan(space, threads="1", prepacking="on")
    assert plan(space, threads="1", prepacking="off")["prepacking"] == "off"
    assert plan(space, threads="2", spinning="off")["spinning"] == "off"
    assert plan(space, threads="2", prepacking="parallel")["prepacking"] == "parallel"


def test_saved_copies_without_prepacking_are_the_plain_mapped_file():
    space = cpu_space()
    assert plan(space, form="prepacked", prepacking="off") == plan(space, form="mapped", prepacking="off")
    assert plan(space, form="inline", prepacking="off")["form"] == "inline"


def test_branches_side_by_side_have_no_memory_pattern():
    space = cpu_space()
    assert plan(space, execution="parallel", memory_pattern="off") == plan(space, execution="parallel")


def test_no_run_is_recorded_unless_inputs_are_bound():
    space = cuda_space(allowed=("io_binding",))
    assert plan(space, cuda_graph="on")["io_binding"] == "on"
    assert plan(space, cuda_graph="on") in space.neighbours(space.base)
    unbound = restrict(space, {"io_binding": ("off",)})
    assert plan(unbound, cuda_graph="on") == unbound.base
    for choice in itertools.islice(choices_of(space), 20_000):
        assert choice["io_binding"] == "on" or choice["cuda_graph"] == "off"


def test_settings_come_on_top_of_the_users_options():
    one: Options = {"enable_mem_pattern": False, "session.x": "1"}
    other: Options = {"session.y": "2", "prefer_nhwc": "1"}
    space = Space({"a": {"on": one}, "b": {"on": other}})
    options = SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": 3}, {"session.z": "0"})
    providers = (ProviderRecord(CUDA, {"use_tf32": "0"}), ProviderRecord("CPUExecutionProvider"))
    tuned, on = space.apply(space.base, options, providers)
    assert tuned.attributes == {"intra_op_num_threads": 3, "enable_mem_pattern": False}
    assert tuned.config_entries == {"session.x": "1", "session.y": "2", "session.z": "0"}
    assert on == (ProviderRecord(CUDA, {"use_tf32": "0", "prefer_nhwc": "1"}), providers[1])
    assert options.config_entries == {"session.z": "0"}


SOON = ProbeResult(
    ready_ms=86.0, init_ms=50.0, first_ms=36.0, steady_ms=31.0, private_mb=300.0, peak_mb=500.0
)
STEADY = ProbeResult(
    ready_ms=304.0, init_ms=270.0, first_ms=34.0, steady_ms=22.0, private_mb=700.0, peak_mb=900.0
)
BASELINE = ProbeResult(
    ready_ms=623.0, init_ms=580.0, first_ms=43.0, steady_ms=22.0, private_mb=900.0, peak_mb=1300.0
)
"""A transformer on two cores: without prepacking, with, and as plain ONNX Runtime loads it."""


def trial(*figures: ProbeResult, failure: str | None = None) -> Trial:
    return Trial(0, "screening", DEFAULT, list(figures), [BASELINE] * len(figures), failure)


def test_a_session_costs_its_load_its_first_run_and_the_others():
    assert per_load(1).cost_ms(SOON) == 86.0
    assert per_load(2).cost_ms(SOON) == 117.0
    assert per_load(1000).cost_ms(STEADY) == 304.0 + 999 * 22.0


def test_another_start_changes_when_a_plan_is_ready_and_nothing_else():
    later = SOON.with_start(SOON.start_ms + 7.0)
    assert later == dataclasses.replace(SOON, ready_ms=SOON.ready_ms + 7.0)
    assert STEADY.with_start(later.start_ms).start_ms == later.start_ms


def test_a_limit_that_is_just_kept_is_kept():
    objective = per_load(1, max_private_mb=300.0, max_steady_ratio=31 / 22)
    assert objective.violations([SOON], [BASELINE]) == ()
    assert objective.is_allowed(trial(SOON))


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (per_load(1, max_private_mb=299.0), "private memory 300 MB, allowed 299"),
        (per_load(1, max_steady_ratio=1.4), "steady run 1.409 × default, allowed 1.4"),
        (per_load(1, max_gpu_mb=1000.0), "GPU memory 1200 MB, allowed 1000"),
    ],
)
def test_a_limit_that_is_exceeded_is_told_with_both_figures(objective, told):
    figures = dataclasses.replace(SOON, gpu_mb=1200.0)
    assert objective.violations([figures], [BASELINE]) == (told,)


def test_a_trial_just_beyond_a_limit_is_measured_again_and_one_far_beyond_is_not():
    just, far = (dataclasses.replace(SOON, private_mb=size) for size in (305.0, 320.0))
    objective = per_load(1, max_private_mb=300.0)
    assert objective.is_allowed(trial(just))
    assert objective.violations([just], [BASELINE])
    assert not objective.is_allowed(trial(far))


def test_limits_are_held_against_medians_so_that_one_process_decides_nothing():
    swollen = dataclasses.replace(SOON, private_mb=9000.0)
    assert per_load(1, max_private_mb=300.0).violations([SOON, swollen, SOON], [BASELINE] * 3) == ()


def test_a_score_is_the_median_of_the_rounds():
    double = dataclasses.replace(BASELINE, ready_ms=1246.0)
    assert per_load(1).score(trial(BASELINE, BASELINE, double)) == 1.0
    assert per_load(1).score(trial(double)) == 2.0


def test_a_trial_that_failed_has_an_infinite_score_and_is_not_allowed():
    for failed in (trial(failure="SIGSEGV"), trial(SOON, failure="SIGSEGV"), trial()):
        assert per_load(1).score(failed) == float("inf")
        assert not per_load(1).is_allowed(failed)
