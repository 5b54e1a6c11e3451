"""What is chosen of measured finalists; figures are those of a transformer on two cores, in ms and MB."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.children.probe import ProbeResult
from ortprep.errors import StageError
from ortprep.measuring.comparison import centre, paired_ratio
from ortprep.tuning.final import MAX_FIRST_PHASE_RATIO, choose
from ortprep.tuning.objective import PlanSearchResult, Trial
from ortprep.tuning.space import DEFAULT, shares_files
from tests.tuning.builders import TRANSFORMER, cpu_space, per_load, plan

SPACE = cpu_space(TRANSFORMER, cores=2)
BASE = SPACE.base
UNPACKED = plan(SPACE, prepacking="off")
PARALLEL = plan(SPACE, prepacking="parallel")
SAVED = plan(SPACE, form="prepacked")
ORT_FORM = plan(SPACE, form="ort")

WOBBLE = (1.0, 0.99, 1.01, 0.995, 1.005)


def rounds(first_result_ms, steady_ms, private_mb=500.0):
    """Returns five processes within 2 % of each other."""
    return tuple(
        ProbeResult(
            ready_ms=first_result_ms * wobble,
            init_ms=0.8 * first_result_ms * wobble,
            first_ms=0.2 * first_result_ms * wobble,
            steady_ms=steady_ms * wobble,
            private_mb=private_mb,
            peak_mb=2 * private_mb,
        )
        for wobble in WOBBLE
    )


def turned(figures, places=2):
    """Returns the same processes in other rounds."""
    return (*figures[places:], *figures[:places])


def found(finals, *, baseline=DEFAULT):
    return PlanSearchResult(trials=(), finals=finals, baseline=baseline, elapsed_s=0.0)


def chosen(finals, objective, space=SPACE):
    return choose(space, objective, found({DEFAULT: rounds(623, 22, 900), **finals})).choice


def test_the_number_of_runs_decides_between_a_soon_first_result_and_short_runs():
    finals = {BASE: rounds(304, 22), UNPACKED: rounds(86, 31)}
    assert chosen(finals, per_load(1)) == UNPACKED
    assert chosen(finals, per_load(1000)) == BASE


def test_a_plan_that_exceeds_a_limit_is_not_chosen_though_it_costs_least():
    finals = {BASE: rounds(304, 22, 700), SAVED: rounds(150, 22, 690), UNPACKED: rounds(86, 31, 300)}
    assert chosen(finals, per_load(10, max_private_mb=500)) == UNPACKED


def tried(choice, *, failure=None, private_mb=500.0):
    figures = () if failure else rounds(304, 22, private_mb)[:2]
    return Trial(0, choice, list(figures), list(rounds(623, 22, 900)[: len(figures)]), failure)


def test_without_a_comparison_the_base_is_left_or_what_worked():
    alone = found({DEFAULT: rounds(623, 22)})
    verdict = choose(SPACE, per_load(1), dataclasses.replace(alone, trials=(tried(BASE), tried(SAVED))))
    assert verdict.choice == BASE
    assert verdict.reason == "the base plan: nothing within the limits could be compared"
    crashed = dataclasses.replace(alone, trials=(tried(BASE, failure="SIGSEGV"), tried(SAVED)))
    assert choose(SPACE, per_load(1), crashed).choice == SAVED


def test_a_plan_that_failed_is_never_what_is_left():
    trials = (tried(BASE, failure="SIGSEGV"), tried(SAVED, failure="hung"))
    with pytest.raises(
        StageError, match=r"no plan except default ONNX Runtime runs\n  the base plan: SIGSEGV"
    ):
        choose(SPACE, per_load(1), dataclasses.replace(found({DEFAULT: rounds(623, 22)}), trials=trials))


def test_where_nothing_beats_the_default_what_keeps_the_limits_is_left():
    finals = {DEFAULT: rounds(100, 20), BASE: rounds(150, 20, 500), UNPACKED: rounds(160, 80, 150)}
    assert choose(SPACE, per_load(1000), found(finals)).choice == BASE
    limited = per_load(1000, max_private_mb=300)
    assert choose(SPACE, limited, found(finals)).choice == UNPACKED
    with pytest.raises(StageError, match="no plan stays within the limits") as caught:
        choose(SPACE, per_load(1000, max_private_mb=100), found(finals))
    assert "prepacking=off: private memory 150 MB, allowed 100" in caught.value.message


def test_a_machine_that_slows_down_for_all_changes_no_choice():
    drift = (1.0, 1.3, 1.6, 1.1, 2.0)
    cheaper, dearer = (drifting(rounds(304, steady), drift) for steady in (20.0, 20.7))
    default = drifting(rounds(304, 22), drift)
    found_all = found({BASE: dearer, SAVED: cheaper, DEFAULT: default})
    assert choose(SPACE, per_load(1000), found_all).choice == SAVED


def drifting(figures, factors):
    return tuple(
        dataclasses.replace(one, ready_ms=one.ready_ms * factor, steady_ms=one.steady_ms * factor)
        for one, factor in zip(figures, factors, strict=True)
    )


PHASES = {
    DEFAULT: rounds(623, 22, 900),
    BASE: rounds(304, 22, 700),
    UNPACKED: rounds(86, 31, 300),
    PARALLEL: rounds(200, 22.5, 700),
}


def test_a_plan_with_a_much_sooner_first_result_over_the_same_files_serves_first():
    verdict = choose(SPACE, per_load(100_000), found(PHASES))
    assert (verdict.choice, verdict.first_phase) == (BASE, UNPACKED)
    assert verdict.overlap_mb == 1000.0


def test_no_plan_serves_first_where_both_sessions_would_exceed_the_memory_limit():
    within = choose(SPACE, per_load(100_000, max_private_mb=1000), found(PHASES))
    assert within.first_phase == UNPACKED
    beyond = choose(SPACE, per_load(100_000, max_private_mb=999), found(PHASES))
    assert (beyond.choice, beyond.first_phase) == (BASE, None)


ORT_UNPACKED = plan(SPACE, form="ort", prepacking="off")


def test_no_plan_over_other_files_serves_first():
    finals = {DEFAULT: PHASES[DEFAULT], BASE: PHASES[BASE], ORT_FORM: rounds(86, 31)}
    assert choose(SPACE, per_load(100_000), found(finals)).first_phase is None
    later = {**finals, UNPACKED: turned(rounds(120, 31))}
    assert choose(SPACE, per_load(100_000), found(later)).first_phase == UNPACKED


def test_no_plan_serves_first_that_is_ready_as_soon_within_the_noise():
    finals = {DEFAULT: rounds(623, 22), BASE: rounds(304, 22)}
    for places in range(1, 5):
        alike = {**finals, UNPACKED: turned(rounds(303, 31), places)}
        assert choose(SPACE, per_load(100_000), found(alike)).first_phase is None
    scattered = tuple(
        dataclasses.replace(one, ready_ms=ms)
        for one, ms in zip(finals[BASE], (150.0, 420.0, 180.0, 390.0, 330.0), strict=True)
    )
    noisy = {**finals, UNPACKED: scattered}
    assert choose(SPACE, per_load(100_000), found(noisy)).first_phase is None


OWN = (BASE, UNPACKED, PARALLEL, SAVED, ORT_FORM, ORT_UNPACKED)


@given(
    st.lists(st.tuples(st.floats(20, 900), st.floats(0.5, 60)), min_size=len(OWN), max_size=len(OWN)),
    st.sampled_from((1, 2, 10, 1000, 10**6)),
)
def test_a_pair_never_costs_more_than_the_best_plan_alone(figures, runs):
    objective = per_load(runs)
    finals = {plan: rounds(*of_plan) for plan, of_plan in zip(OWN, figures, strict=True)}
    verdict = choose(SPACE, objective, found({DEFAULT: rounds(1000, 61), **finals}))
    second = finals[verdict.choice][0]
    first = second if verdict.first_phase is None else finals[verdict.first_phase][0]
    best = min(objective.cost_ms(of_plan[0]) for of_plan in finals.values())
    assert objective.pair_cost_ms(first, second) <= 1.021 * best  # 1 % of the pair, 1 % of its second plan
    if verdict.first_phase is not None:
        assert first.ready_ms <= 1.000001 * MAX_FIRST_PHASE_RATIO * second.ready_ms
        assert first.steady_ms > second.steady_ms
    elif runs == 10**6:
        alike = [of_plan[0] for plan, of_plan in finals.items() if shares_files(plan, verdict.choice)]
        soonest = min(one.ready_ms for one in alike)
        assert soonest >= 0.999999 * MAX_FIRST_PHASE_RATIO * second.ready_ms


positive = st.floats(0.01, 1e6)


@given(st.lists(positive, min_size=1, max_size=9), st.floats(0.1, 10))
def test_a_paired_ratio_of_a_multiple_is_the_factor_whatever_the_rounds_were_like(values, factor):
    assert paired_ratio([factor * value for value in values], values) == pytest.approx(factor)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=9))
def test_a_paired_ratio_turned_round_is_its_inverse(pairs):
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    assert paired_ratio(one, other) == pytest.approx(1 / paired_ratio(other, one))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_a_centre_is_among_its_values_and_moves_with_them(values):
    middle = centre(values)
    assert min(values) - 1e-6 <= middle <= max(values) + 1e-6
    assert centre([value + 5 for value in values]) == pytest.approx(middle + 5, abs=1e-6)
