"""What is chosen of measured finalists; figures are those of a transformer on two cores, in ms and MB."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pipeline.tuning.choosing import beats, choose
from pipeline.tuning.objective import Figures, Objective
from pipeline.tuning.search import Found, find_twins
from pipeline.tuning.space import DEFAULT, Choice, Space
from tests.tuning.spaces import TRANSFORMER, cpu_space, plan

SPACE = cpu_space(TRANSFORMER, cores=2, levels=("all",))
BASE = SPACE.base
UNPACKED = plan(SPACE, prepacking="off")
PARALLEL = plan(SPACE, prepacking="parallel")
SAVED = plan(SPACE, form="prepacked")
INLINE = plan(SPACE, form="inline")

WOBBLE = (1.0, 0.99, 1.01, 0.995, 1.005)


def rounds(first_result_ms: float, steady_ms: float, private_mb: float = 500.0) -> tuple[Figures, ...]:
    """Returns five processes within 2 % of each other."""
    return tuple(
        Figures(
            init_ms=0.8 * first_result_ms * wobble,
            first_ms=0.2 * first_result_ms * wobble,
            steady_ms=steady_ms * wobble,
            private_mb=private_mb,
            peak_mb=2 * private_mb,
        )
        for wobble in WOBBLE
    )


def turned(figures: tuple[Figures, ...], places: int = 2) -> tuple[Figures, ...]:
    """Returns the same processes in other rounds."""
    return (*figures[places:], *figures[:places])


def found(finals: Mapping[Choice, tuple[Figures, ...]], *, anchor: Choice = DEFAULT) -> Found:
    return Found(trials=(), finals=finals, anchor=anchor, noise=0.02, ended="", elapsed_s=0.0)


def chosen(
    finals: Mapping[Choice, tuple[Figures, ...]], objective: Objective, space: Space = SPACE
) -> Choice:
    return choose(space, objective, found({DEFAULT: rounds(623, 22, 900), **finals})).choice


def test_the_number_of_runs_decides_between_a_soon_first_result_and_short_runs() -> None:
    finals = {BASE: rounds(304, 22), UNPACKED: rounds(86, 31)}
    assert chosen(finals, Objective(1)) == UNPACKED
    assert chosen(finals, Objective(1000)) == BASE


def test_of_plans_that_cost_the_same_the_one_with_the_sooner_first_result_is_taken() -> None:
    finals = {BASE: rounds(304, 22), SAVED: turned(rounds(150, 22))}
    assert chosen(finals, Objective(100_000)) == SAVED
    assert chosen(dict(reversed(finals.items())), Objective(100_000)) == SAVED


def test_of_plans_that_are_alike_in_all_the_one_that_changes_least_is_taken() -> None:
    two_changes = plan(SPACE, form="inline", memory_arena="off")
    finals = {
        two_changes: rounds(299, 21.9),
        INLINE: turned(rounds(300, 21.95)),
        PARALLEL: turned(rounds(420, 21.9), 3),
    }
    assert chosen(finals, Objective(1000)) == INLINE
    assert chosen({**finals, BASE: turned(rounds(301, 21.95), 3)}, Objective(1000)) == BASE


def test_a_cheaper_plan_beyond_the_noise_is_taken_though_it_changes_more() -> None:
    finals = {BASE: rounds(304, 22), plan(SPACE, form="inline", memory_arena="off"): rounds(304, 20)}
    assert chosen(finals, Objective(1000)) != BASE


def test_the_default_is_the_measure_and_never_chosen() -> None:
    verdict = choose(SPACE, Objective(1000), found({DEFAULT: rounds(100, 20), BASE: rounds(150, 22)}))
    assert (verdict.choice, verdict.beats_default, verdict.first_phase) == (BASE, False, None)


def test_a_difference_within_the_noise_beats_nothing() -> None:
    one, other = rounds(623, 22), turned(rounds(622, 22))
    assert not beats(other, one, Objective(1000))
    verdict = choose(SPACE, Objective(1000), found({DEFAULT: one, BASE: other}))
    assert not verdict.beats_default


def test_a_sooner_first_result_beats_the_default_unless_runs_take_longer() -> None:
    default = rounds(623, 22)
    assert beats(turned(rounds(300, 22)), default, Objective(10**9))
    assert not beats(rounds(300, 25), default, Objective(10**9))
    assert beats(rounds(300, 25), default, Objective(10))


def test_a_plan_that_exceeds_a_limit_is_not_chosen_though_it_costs_least() -> None:
    finals = {BASE: rounds(304, 22, 700), SAVED: rounds(150, 22, 690), UNPACKED: rounds(86, 31, 300)}
    assert chosen(finals, Objective(10, max_private_mb=500)) == UNPACKED
    assert chosen(finals, Objective(1, max_steady_ratio=1.1)) == SAVED


def test_without_a_default_the_best_plan_is_chosen_and_beats_nothing() -> None:
    finals = {BASE: rounds(304, 22), UNPACKED: rounds(86, 31)}
    verdict = choose(SPACE, Objective(1), found(finals, anchor=BASE))
    assert (verdict.choice, verdict.beats_default) == (UNPACKED, False)
    verdict = choose(SPACE, Objective(10_000), found(finals, anchor=BASE))
    assert verdict.choice == BASE


def test_nothing_measured_leaves_the_base() -> None:
    verdict = choose(SPACE, Objective(1), found({DEFAULT: rounds(623, 22)}))
    assert verdict.choice == BASE
    assert verdict.reason == "nothing beat the default: no other plan could be measured"


def test_a_default_missing_from_the_last_comparison_leaves_the_base() -> None:
    verdict = choose(SPACE, Objective(1), found({BASE: rounds(304, 22), UNPACKED: rounds(86, 31)}))
    assert (verdict.choice, verdict.beats_default) == (BASE, False)
    assert verdict.reason == "nothing beat the default: it failed in the last comparison"


def test_reasons_name_the_plan_its_gains_and_the_number_of_runs() -> None:
    finals = {DEFAULT: rounds(600, 20), BASE: rounds(300, 20)}
    assert choose(SPACE, Objective(1), found(finals)).reason == (
        "the plan without a search: cost 0.5×, first result 0.5×, steady run 1× of the default's "
        "at 1 runs per load"
    )
    finals = {DEFAULT: rounds(300, 20), BASE: rounds(600, 20, 700)}
    reason = choose(SPACE, Objective(1, max_private_mb=600), found(finals)).reason
    assert reason.startswith(
        "nothing beat the default: the best, the plan without a search, has cost 2×, first result 2×"
    )
    assert reason.endswith("beyond its limits (private memory 700 MB, allowed 600)")


PHASES = {
    DEFAULT: rounds(623, 22, 900),
    BASE: rounds(304, 22, 700),
    UNPACKED: rounds(86, 31, 300),
    PARALLEL: rounds(200, 22.5, 700),
}


def test_a_plan_with_a_much_sooner_first_result_over_the_same_files_serves_first() -> None:
    verdict = choose(SPACE, Objective(100_000), found(PHASES))
    assert (verdict.choice, verdict.first_phase) == (BASE, UNPACKED)
    assert verdict.overlap_mb == 1000.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({UNPACKED: rounds(260, 31, 300)}, "it gains too little"),
        ({UNPACKED: ()}, "it was not measured"),
    ],
)
def test_no_plan_serves_first_that_is_not_worth_it(
    changes: Mapping[Choice, tuple[Figures, ...]], why: str
) -> None:
    finals = {choice: figures for choice, figures in {**PHASES, **changes}.items() if figures}
    del finals[PARALLEL]
    verdict = choose(SPACE, Objective(100_000), found(finals))
    assert (verdict.choice, verdict.first_phase, verdict.overlap_mb) == (BASE, None, None), why


def test_no_plan_serves_first_where_both_sessions_would_exceed_the_memory_limit() -> None:
    within = choose(SPACE, Objective(100_000, max_private_mb=1000), found(PHASES))
    assert within.first_phase == UNPACKED
    beyond = choose(SPACE, Objective(100_000, max_private_mb=999), found(PHASES))
    assert (beyond.choice, beyond.first_phase) == (BASE, None)


def test_no_plan_serves_first_that_needs_other_files_or_runs_otherwise() -> None:
    finals = {DEFAULT: PHASES[DEFAULT], BASE: PHASES[BASE], INLINE: rounds(86, 31)}
    assert choose(SPACE, Objective(100_000), found(finals)).first_phase is None
    assert set(find_twins(SPACE, BASE)) == {UNPACKED, PARALLEL}
    # Without prepacking, saved copies are not looked at: that is another plan's file.
    assert set(find_twins(SPACE, SAVED)) == {plan(SPACE, form="prepacked", prepacking="parallel")}


def test_the_soonest_plan_needs_none_before_it() -> None:
    assert choose(SPACE, Objective(1), found(PHASES)).first_phase is None
