from __future__ import annotations

import json

import pytest

from bench.load import GOALS, ModelReport, build_json, build_report, build_table, mean_ratios, missed_goals
from pipeline.runtime.probe import ProbeResult


def results(
    *, init_ms: float, first_ms: float = 20.0, steady_ms: float = 18.0, private_mb: float = 100.0
) -> tuple[ProbeResult, ...]:
    """Three processes that differ by a hundredth."""
    return tuple(
        ProbeResult(
            import_ms=100.0,
            init_ms=init_ms * drift,
            first_ms=first_ms * drift,
            steady_ms=steady_ms * drift,
            steady_p25_ms=steady_ms,
            steady_p75_ms=steady_ms,
            steady_p99_ms=steady_ms,
            runs=50,
            private_mb=private_mb,
            peak_mb=300.0,
            gpu_mb=None,
            onnxruntime="1.31.1",
            ready_ms=100.0 + (init_ms + first_ms) * drift,
        )
        for drift in (1.0, 1.01, 0.99)
    )


def report(*, model: str = "net", **bundle: float) -> ModelReport:
    """A model whose default takes 200 ms + 20 ms, and its bundle what is given."""
    figures = {"init_ms": 20.0, "first_ms": 30.0, "private_mb": 50.0} | bundle
    return build_report(
        model,
        {"default": results(init_ms=200.0), "recipe": results(init_ms=100.0), "bundle": results(**figures)},
    )


def test_ratios_say_how_many_times_sooner_and_how_much_of_the_time_and_memory() -> None:
    ratios = report(steady_ms=18.9).ratios["bundle"]
    assert ratios == pytest.approx(
        {"init_ms": 10.0, "first_result_ms": 4.4, "steady_ms": 1.05, "private_mb": 0.5}
    )


def test_models_are_averaged_so_that_twice_and_half_cancel() -> None:
    pair = (report(init_ms=100.0), report(init_ms=400.0))
    assert mean_ratios(pair, "bundle")["init_ms"] == pytest.approx(1.0)


def test_a_bundle_within_all_goals_misses_none() -> None:
    assert missed_goals([report()]) == ()


@pytest.mark.parametrize(
    ("bundle", "missed"),
    [
        ({"init_ms": 52.0}, "init ×: expected at least 4, got 3.846"),
        ({"first_ms": 90.0}, "first result ×: expected at least 2.5, got 2.000"),
        ({"steady_ms": 20.0}, "steady: expected 0.95 to 1.03, got 1.111"),
        ({"steady_ms": 12.0}, "steady: expected 0.95 to 1.03, got 0.667"),
        ({"private_mb": 70.0}, "private: expected at most 0.6, got 0.700"),
    ],
)
def test_every_missed_goal_is_told_with_its_figure(bundle: dict[str, float], missed: str) -> None:
    assert missed_goals([report(model="net", **bundle)]) == (missed,)


def test_one_slower_model_is_told_though_the_mean_is_within_the_goals() -> None:
    reports = [
        report(model="slow", init_ms=200.0, first_ms=40.0),
        *(report(init_ms=2.0, first_ms=8.0) for _ in "abc"),
    ]
    assert missed_goals(reports) == ("slow: slower to its first result",)


def test_the_table_has_a_row_per_plan_and_the_means() -> None:
    lines = build_table([report(model="one"), report(model="two")]).splitlines()
    assert len(lines) == 1 + 2 * 3 + 2
    assert "(10.00×)" in next(line for line in lines if line.startswith("one") and "bundle" in line)


def test_the_result_is_json_that_carries_the_machine_and_the_goals() -> None:
    text = json.dumps(build_json([report()], {"cpu_model": "some"}), allow_nan=False)
    data = json.loads(text)
    assert data["machine"] == {"cpu_model": "some"}
    assert len(data["goals"]) == len(GOALS)
    assert data["missed"] == []
