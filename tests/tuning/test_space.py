from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import TuningError
from ortprep.options import CUDA
from ortprep.tuning.knobs import restrict
from ortprep.tuning.space import Options, PlanChoice, Space
from tests.tuning.builders import (
    choices_of,
    cpu_space,
    cuda_space,
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
    with pytest.raises(TuningError, match="no value of form is left to search\n  expected one of mapped"):
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
