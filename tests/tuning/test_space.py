"""What cannot matter is not searched, and what is searched is known to that ONNX Runtime."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.children.probe import ProbeResult
from ortprep.options import CUDA, check_options, known_options
from ortprep.tuning.objective import Trial
from ortprep.tuning.space import ATTRIBUTES, DEFAULT, Space
from tests.tuning.builders import (
    CONVOLUTIONS,
    TRANSFORMER,
    VERSIONS,
    cpu_space,
    cuda_space,
    names,
    per_load,
    plan,
    raw_choices,
    restricted_spaces,
    spaces,
)


@given(st.data())
def test_a_canonical_choice_is_of_the_space_and_its_own_canonical_choice(data):
    space = data.draw(restricted_spaces())
    choice = space.canonical(data.draw(raw_choices(space)))
    assert space.canonical(choice) == choice
    assert [knob for knob, _ in choice.values] == list(space.knobs)
    assert all(value in space.knobs[knob] for knob, value in choice.values)


@given(st.data())
def test_any_plans_neighbours_are_what_one_changed_knob_comes_to(data):
    space = data.draw(restricted_spaces())
    choice = space.canonical(data.draw(raw_choices(space)))
    neighbours = space.neighbours(choice)
    assert choice not in neighbours
    assert len(set(neighbours)) == len(neighbours)
    single = {choice.but(knob, value) for knob, values in space.knobs.items() for value in values}
    assert set(neighbours) == {space.canonical(other) for other in single} - {choice}


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ({"threads": "1", "spinning": "off"}, {"threads": "1"}),  # one thread never spins
        ({"threads": "1", "prepacking": "parallel"}, {"threads": "1", "prepacking": "on"}),
        # Saved copies without prepacking are the plain mapped file.
        ({"form": "prepacked", "prepacking": "off"}, {"form": "mapped", "prepacking": "off"}),
    ],
)
def test_choices_that_come_to_the_same_are_one(values, same):
    assert plan(cpu_space(), **values) == plan(cpu_space(), **same)


def test_settings_come_on_top_of_the_users_options():
    one = {"enable_mem_pattern": False, "session.x": "1"}
    other = {"session.y": "2", "prefer_nhwc": "1"}
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


def trial(*figures, failure=None):
    return Trial(0, DEFAULT, list(figures), [BASELINE] * len(figures), failure)


def test_a_session_costs_its_load_its_first_run_and_the_others():
    assert per_load(1).cost_ms(SOON) == 86.0
    assert per_load(2).cost_ms(SOON) == 117.0
    assert per_load(1000).cost_ms(STEADY) == 304.0 + 999 * 22.0


def test_a_limit_that_is_exceeded_is_told_with_both_figures():
    kept = per_load(1, max_private_mb=300.0)
    assert kept.violations([SOON]) == ()
    assert kept.keeps_limits(trial(SOON))
    told = ("private memory 300 MB, allowed 299",)
    assert per_load(1, max_private_mb=299.0).violations([SOON]) == told


def test_limits_are_held_against_medians_so_that_one_process_decides_nothing():
    swollen = dataclasses.replace(SOON, private_mb=9000.0)
    assert per_load(1, max_private_mb=300.0).violations([SOON, swollen, SOON]) == ()


def test_a_score_is_the_median_of_the_rounds_and_more_in_proportion_beyond_a_limit():
    double = dataclasses.replace(BASELINE, ready_ms=1246.0)
    assert per_load(1).score(trial(BASELINE, BASELINE, double)) == 1.0
    assert per_load(1).score(trial(double)) == 2.0
    assert per_load(1, max_private_mb=450.0).score(trial(double)) == 4.0


def test_a_trial_that_failed_has_an_infinite_score_and_keeps_no_limit():
    for failed in (trial(failure="SIGSEGV"), trial(SOON, failure="SIGSEGV"), trial()):
        assert per_load(1).score(failed) == float("inf")
        assert not per_load(1).keeps_limits(failed)


# -- what cannot matter is not searched, and what is searched is known to that ONNX Runtime


def but(facts, **changes):
    return dataclasses.replace(facts, **changes)


def all_options(space):
    return [options for values in space.knobs.values() for options in values.values()]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("build", [cpu_space, cuda_space])
@pytest.mark.parametrize("facts", [CONVOLUTIONS, TRANSFORMER], ids=["convolutions", "transformer"])
def test_every_option_of_every_knob_is_known_to_that_version_with_that_value(version, build, facts):
    space = build(facts, onnxruntime=version)
    for options in all_options(space):
        entries = {name: value for name, value in options.items() if "." in name}
        attributes = {name: value for name, value in options.items() if name in ATTRIBUTES}
        others = {name: value for name, value in options.items() if name not in {*entries, *attributes}}
        assert check_options("session", entries, version=version) == ()
        assert check_options("attribute", attributes, version=version) == ()
        assert check_options(CUDA, others, version=version) == ()


@given(spaces())
def test_every_knob_has_a_choice_and_the_base_sets_no_option_at_all(space):
    for knob, values in space.knobs.items():
        assert len(values) > 1 or knob == "form"
    assert "form" in names(space)
    options, providers = SessionOptionsRecord("ORT_DISABLE_ALL"), (ProviderRecord(CUDA),)
    assert space.apply(space.base, options, providers) == (options, providers)


OPTIONS = {
    option.name
    for option in (
        *known_options("session", "1.31.1"),
        *known_options("attribute", "1.31.1"),
        *known_options(CUDA, "1.31.1"),
    )
    if option.owner is None
}


@pytest.mark.parametrize("build", [cpu_space, cuda_space])
def test_an_option_that_the_user_has_set_is_not_searched(build):
    for option in {name for options in all_options(build()) for name in options}:
        space = build(fixed={option: "0"})
        assert not any(option in options for options in all_options(space))


@pytest.mark.parametrize("build", [cpu_space, cuda_space])
def test_whatever_the_user_has_set_every_plan_has_its_files(build):
    for option in OPTIONS:
        space = build(fixed={option: "0"})
        assert "mapped" in space.knobs["form"], option
