"""The order in which jobs prefer a bundle's variants."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.manifest import Decision, MeasurementRecord, VariantRecord
from ortprep.measuring.shipped import PREPARED
from ortprep.stages.core.contract import PORTABLE, VariantPlan
from ortprep.stages.package.prepared_variants import PreparedVariant, order_variants
from tests.tuning.builders import per_load

ONE_RUN = per_load(1)


def exactly(value: float) -> Samples:
    return Samples((value,) * 3)


def figures(plan: str, first_result_ms: float) -> PlanFigures:
    cost = exactly(first_result_ms)
    return PlanFigures(plan, cost, cost, cost, cost, exactly(1.0), cost, cost)


def variant(
    name: str, *, shipped: str = PREPARED, parent: str | None = None, **costs: float
) -> PreparedVariant:
    plans = tuple(figures(plan, cost) for plan, cost in costs.items())
    measurements = (MeasurementRecord("warm", 3, "x=[1]", plans),) if costs else ()
    decision = Decision(shipped, faster=True, reason="") if costs else None
    bucket = "batch" in name
    plan = VariantPlan(name, name.partition("-")[0].replace(PORTABLE, "cpu"), parent=parent, is_bucket=bucket)
    nothing = cast("Any", None)
    record = VariantRecord(name, plan.target, "all", (), nothing, measurements, decision)
    return PreparedVariant(plan, nothing, nothing, record)


def order(*variants: PreparedVariant, targets: tuple[str, ...] = ("cpu",)) -> list[str]:
    return [one.plan.name for one in order_variants(variants, targets, ONE_RUN)]


def converted(name: str, ratio: float, parent: str = "cpu") -> PreparedVariant:
    return variant(name, parent=parent, prepared=100 * ratio, unconverted=100)


BASE, ANYWHERE = variant("cpu", prepared=100), variant(PORTABLE)


def test_a_precision_comes_before_fp32_only_if_it_is_cheaper_by_more_than_a_little():
    assert order(BASE, converted("cpu-int8", 0.5), ANYWHERE) == ["cpu-int8", "cpu", PORTABLE]
    assert order(BASE, converted("cpu-int8", 0.99), ANYWHERE)[0] == "cpu"


def test_of_several_the_cheapest_comes_first():
    made = order(BASE, converted("cpu-int8", 0.7), converted("cpu-int4", 0.6), ANYWHERE)
    assert made == ["cpu-int4", "cpu-int8", "cpu", PORTABLE]


def test_what_is_slower_and_less_accurate_comes_after_what_runs_anywhere():
    assert order(BASE, converted("cpu-fp16", 4.0), ANYWHERE) == ["cpu", PORTABLE, "cpu-fp16"]


def test_what_fp32_ships_is_what_a_precision_has_to_beat():
    base = variant("cpu", shipped=PORTABLE, prepared=100, portable=40)
    assert order(base, converted("cpu-int8", 0.5), ANYWHERE) == ["cpu", PORTABLE, "cpu-int8"]


def test_both_are_compared_in_the_same_rounds_where_fp32_ships_the_source():
    base = variant("cpu", shipped="default", default=100, prepared=120)  # another program ran for a moment
    int8 = variant("cpu-int8", parent="cpu", default=100, unconverted=100, prepared=90)
    assert order(base, int8, ANYWHERE)[0] == "cpu-int8"


def test_a_slow_precision_of_a_gpu_still_comes_before_the_cpu():
    gpu, slow = variant("cuda", prepared=10), converted("cuda-fp16", 2.0, parent="cuda")
    made = order(BASE, gpu, slow, ANYWHERE, targets=("cuda", "cpu"))
    assert made == ["cuda", "cuda-fp16", "cpu", PORTABLE]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=4), st.sampled_from([("cpu",), ("cuda", "cpu")]))
def test_f23_buckets_come_after_all_variants_for_all_shapes(ratios, targets):
    bases = [variant(target, prepared=100) for target in targets]
    buckets = [converted(f"{target}-batch{size}", 0.1, target) for target in targets for size in (1, 8)]
    others = [converted(f"cpu-p{index}", ratio) for index, ratio in enumerate(ratios)]
    made = order(*buckets, *others, *bases, ANYWHERE, targets=targets)
    assert ["batch" in name for name in made] == sorted("batch" in name for name in made)
