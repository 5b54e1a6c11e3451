"""Do models contend, from made-up figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.doctor.concurrent_models.check import place_models
from ortprep.doctor.concurrent_models.verdict import (
    SITUATIONS,
    Contention,
    ModelRuns,
    PlacedModel,
    Situation,
    find_in,
    slow_down,
    tabulate,
)
from ortprep.doctor.diagnosis import Finding
from ortprep.measuring.rounds import InterleavedRuns
from tests.doctor.builders import RuleCase, codes, name_case, written_codes

ON_CPU = (PlacedModel("a", "cpu", 1), PlacedModel("b", "cpu", 1))
ON_GPUS = (PlacedModel("a", "cuda:0", None), PlacedModel("b", "cuda:1", None))


def contention(
    runs_ms: Mapping[Situation, tuple[float, float]],
    *,
    models: tuple[PlacedModel, ...] = ON_GPUS,
    failures: Mapping[Situation, str] | None = None,
) -> Contention:
    rounds = {
        situation: tuple(
            tuple(ModelRuns((run_ms * noise,) * 5) for run_ms in of_models) for noise in (0.99, 1, 1.01)
        )
        for situation, of_models in runs_ms.items()
    }
    return Contention(models, "1.31.1", InterleavedRuns(rounds, failures or {}, 1.0))


def findings_of(alone_ms: float, threads_ms: float, processes_ms: float) -> tuple[Finding, ...]:
    runs = zip(SITUATIONS, ((each, each) for each in (alone_ms, threads_ms, processes_ms)), strict=True)
    return find_in(contention(dict(runs), models=ON_CPU))


CASES = (
    RuleCase(
        "way-failed",
        "problem",
        find_in(contention({"alone": (10, 10)}, failures={"threads": "out of memory"})),
    ),
    RuleCase("rounds-cut", "note", find_in(contention({}))),
    RuleCase("threads-contend", "advice", findings_of(10, 20, 10)),
    RuleCase("processes-contend", "note", findings_of(10, 10, 20)),
    RuleCase("threads-as-fast", "ok", findings_of(10, 10, 10)),
    RuleCase("as-fast-as-alone", "ok", findings_of(10, 10, 10)),
    RuleCase("slower-than-alone", "note", findings_of(10, 20, 20)),
)


def test_every_code_has_a_case() -> None:
    modules = ("concurrent_models.verdict", "concurrent_models.check", "interleaved_runs")
    assert written_codes(*(f"ortprep.doctor.{module}" for module in modules)) == {p.code for p in CASES}


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_every_case_is_found_with_its_severity(case: RuleCase) -> None:
    assert case.is_found


@pytest.mark.parametrize("done", range(3))
def test_too_few_rounds_are_said_to_be_and_compare_nothing(done: int) -> None:
    whole = contention({"alone": (10, 10), "threads": (20, 20), "processes": (10, 10)})
    rounds = {situation: rounds[:done] for situation, rounds in whole.situations.rounds.items() if done}
    cut = dataclasses.replace(whole, situations=InterleavedRuns(rounds, {}, 1.0))
    assert codes(find_in(cut)) == ["rounds-cut"]


def test_threads_that_are_slower_than_processes_contend() -> None:
    """As was reported of one process with ten GPUs: 0.091 ms alone, 0.33 in threads, 0.090 in processes."""
    found = find_in(contention({"alone": (0.091,) * 2, "threads": (0.33,) * 2, "processes": (0.09,) * 2}))
    assert codes(found) == ["threads-contend", "as-fast-as-alone"]
    assert found[0].severity == "advice"
    assert "a (0.091 ms each alone, 0.33 ms in threads of one process" in found[0].text
    assert "SessionPool" in (found[0].hint or "")


def test_only_the_models_that_suffer_are_named() -> None:
    found = find_in(contention({"alone": (10, 10), "threads": (10, 20), "processes": (10, 10)}))
    assert "b (" in found[0].text
    assert "a (" not in found[0].text


def test_threads_as_fast_as_processes_are_good() -> None:
    found = find_in(contention(dict.fromkeys(SITUATIONS, (10, 20))))
    assert codes(found) == ["threads-as-fast", "as-fast-as-alone"]


def test_processes_that_are_slower_are_said_to_be() -> None:
    found = find_in(contention({"alone": (10, 10), "threads": (10, 10), "processes": (15, 10)}))
    assert codes(found) == ["processes-contend", "as-fast-as-alone"]


def test_what_is_slower_than_alone_in_the_better_way_too_is_no_matter_of_threads() -> None:
    found = find_in(
        contention({"alone": (10, 10), "threads": (20, 20), "processes": (20, 20)}, models=ON_CPU)
    )
    assert codes(found) == ["threads-as-fast", "slower-than-alone"]
    assert "memory bandwidth" in (found[1].hint or "")


def test_models_that_share_a_gpu_are_told_to_part() -> None:
    shared = (PlacedModel("a", "cuda:0", None), PlacedModel("b", "cuda:0", None))
    found = find_in(
        contention({"alone": (10, 10), "threads": (20, 20), "processes": (20, 20)}, models=shared)
    )
    assert found[1].hint == "give each a device of its own"


@pytest.mark.parametrize("failed", SITUATIONS)
def test_a_situation_that_fails_is_a_problem_and_the_others_are_compared(failed: Situation) -> None:
    rest: dict[Situation, tuple[float, float]] = {
        situation: (10, 10) for situation in SITUATIONS if situation != failed
    }
    found = find_in(contention(rest, failures={failed: "out of memory"}))
    assert codes(found)[0] == "way-failed"
    assert "out of memory" in found[0].text
    assert len(found) > 1


@given(st.floats(0.01, 1e4), st.floats(0.5, 0.95), st.sampled_from(SITUATIONS))
def test_contention_of_less_than_a_tenth_is_never_reported(
    run_ms: float, share: float, slowest: Situation
) -> None:
    runs = dict.fromkeys(SITUATIONS, (run_ms, run_ms))
    runs[slowest] = (run_ms * (1 + share / 10),) * 2
    assert not {"threads-contend", "processes-contend", "slower-than-alone"} & set(
        codes(find_in(contention(runs)))
    )


def test_a_slow_down_is_relative_to_alone() -> None:
    what = contention({"alone": (10, 10), "threads": (20, 5)})
    assert slow_down(what, 0, "threads") == pytest.approx(2)
    assert slow_down(what, 1, "threads") == pytest.approx(0.5)
    assert slow_down(what, 0, "processes") is None


def test_a_table_has_every_model_in_every_situation() -> None:
    table = tabulate(contention(dict.fromkeys(SITUATIONS, (10, 20))))
    assert len(table.rows) == 6
    assert all(len(row) == len(table.columns) for row in table.rows)


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=8),
    st.lists(st.sampled_from(("cpu", "cuda:0", "cuda:1")), min_size=1, max_size=4, unique=True),
    st.integers(1, 64),
)
def test_every_model_has_a_device_and_a_name_of_its_own_and_the_cores_are_shared(
    names: list[str], devices: list[str], cores: int
) -> None:
    placed = place_models(names, devices, cores=cores)
    assert len({model.name for model in placed}) == len(names)
    assert {model.device for model in placed} == set(devices[: len(names)])
    threads = [model.threads for model in placed if model.threads is not None]
    assert all(model.threads is None for model in placed if model.device != "cpu")
    assert sum(threads) <= max(cores, len(threads))
    assert len(set(threads)) <= 1
