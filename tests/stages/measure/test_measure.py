"""What is measured in fresh processes, and what ships of it."""

import math
import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.loader_config import Requirements, Variant, VersionRange
from ortprep.bundle.manifest import SourceRecord
from ortprep.bundle.model_facts import ModelInterface
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.children.answers import Answers
from ortprep.children.probe import ProbeResult
from ortprep.errors import ChildError, StageError
from ortprep.measuring.comparison import is_below
from ortprep.measuring.shipped import DEFAULT, FIRST
from ortprep.runtime.loading.session import CPU, build_session, default_plan
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.spec.models import MeasureSpec, ModelSpec, SourceSpec, TuneSpec
from ortprep.stages.core.contract import Context, Plan, TaskId, Upstream
from ortprep.stages.core.results import FetchResult, MeasureResult, PreparedResult
from ortprep.stages.core.samples import Sample
from ortprep.stages.measure import stage
from ortprep.stages.measure.decision import decide, decide_fallback, with_common_start
from ortprep.stages.measure.stage import MeasureStage
from ortprep.stages.verify.reference import ReferenceAnswers, write_reference
from tests.builders import conv_net
from tests.tuning.builders import per_load

SPEC = ModelSpec(
    name="net",
    source=SourceSpec(path="net.onnx"),
    targets=("cpu",),
    measure=MeasureSpec(rounds=3, cold_rounds=1, steady_s=0.01),
    tune=TuneSpec(max_trials=0),
)
PROVIDERS = (ProviderRecord(CPU),)


@pytest.fixture(autouse=True)
def private_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def fetch_result():
    source = SourceRecord("path", "net.onnx", "", (), {}, 8, {}, 0)
    return FetchResult("net.onnx", source, ModelInterface((), (), {}, external=False))


def optimize_result():
    options, needs = SessionOptionsRecord("ORT_DISABLE_ALL"), Requirements(VersionRange("1.23"), (CPU,))
    variant = Variant("cpu", "cpu", "net_optimized.onnx", (), options, PROVIDERS, needs)
    return PreparedResult(variant, "all", (), "1.31.1")


def build_context(tmp_path, *, spec=SPEC):
    """Lays out what the earlier stages leave, with graphs that ONNX Runtime itself wrote."""
    folders = {name: tmp_path / name for name in ("fetch", "cpu", "portable", "verify", "out")}
    for folder in folders.values():
        folder.mkdir()
    source = folders["fetch"] / "net.onnx"
    onnx.save(conv_net(), str(source))
    for variant, level in (("cpu", "ORT_ENABLE_ALL"), ("portable", "ORT_ENABLE_BASIC")):
        written = {"optimized_model_filepath": str(folders[variant] / "net_optimized.onnx")}
        build_session(default_plan(str(source), CPU, level=level, attributes=written))
    sample = folders["verify"] / "image.npz"
    write_tensors(sample, {"image": np.random.default_rng(0).random((2, 3, 16, 16), np.float32)})
    samples = (Sample(str(sample), "image=[2, 3, 16, 16]", 1536),)
    write_reference(folders["verify"], ReferenceAnswers(samples, Answers((), (), ((),)), ()))
    said = []
    return Context(
        plan=Plan(spec, ("cpu",)),
        variant="cpu",
        upstream={
            TaskId("fetch"): Upstream(folders["fetch"], encode(fetch_result())),
            TaskId("optimize", "cpu"): Upstream(folders["cpu"], encode(optimize_result())),
            TaskId("optimize", "portable"): Upstream(folders["portable"], encode(optimize_result())),
            TaskId("verify", "cpu"): Upstream(folders["verify"], {}),
            TaskId("verify", "portable"): Upstream(folders["verify"], {}),
        },
        folder=folders["out"],
        say=said.append,
    )


def said(context):
    return context.say.__self__


def measured(context):
    result = MeasureStage().run(context)
    return result, decode(MeasureResult, result)


@pytest.mark.slow
def test_every_plan_is_measured_with_a_warm_and_with_a_cold_cache(tmp_path):
    context = build_context(tmp_path)
    _, result = measured(context)
    warm, cold = result.measurements
    # A model this small may or may not be faster; if not, the rounds are doubled before that is believed.
    assert warm.rounds == 6 or (warm.rounds, result.decision.shipped) == (3, "prepared")
    assert (warm.cache, cold.cache, cold.rounds) == ("warm", "cold", 1)
    for record, forked in ((warm, ["forked"]), (cold, [])):
        assert [figures.plan for figures in record.plans] == ["default", "prepared", "portable", *forked]
        assert all(figures.init_ms.count == record.rounds for figures in record.plans)
        assert record.shapes == "image=[2, 3, 16, 16]"
    for figures in warm.plans:
        assert 0 < figures.init_ms.median < figures.first_result_ms.median
        assert figures.private_mb.median > 0
    assert (result.decision.reason in said(context)) == (result.decision.shipped != "prepared")


@pytest.mark.slow
def test_a_plan_that_fails_is_recorded_and_the_rest_compared(tmp_path):
    spec = SPEC.model_copy(update={"measure": MeasureSpec(rounds=3, cold_rounds=0, steady_s=0.01)})
    context = build_context(tmp_path, spec=spec)
    (tmp_path / "fetch" / "net.onnx").write_bytes(b"not a model")
    _, result = measured(context)
    (warm,) = result.measurements
    assert [figures.plan for figures in warm.plans] == ["prepared", "portable", "forked"]
    assert result.decision.shipped == "prepared"
    assert len([line for line in said(context) if line.startswith("default failed")]) == 1


@pytest.mark.slow
def test_a_prepared_model_that_cannot_be_loaded_fails_the_build(tmp_path):
    context = build_context(tmp_path)
    (tmp_path / "cpu" / "net_optimized.onnx").write_bytes(b"")
    with pytest.raises(StageError, match="prepared model failed"):
        MeasureStage().run(context)


figures = st.floats(min_value=0.001, max_value=1e6)
rounds = st.lists(figures, min_size=3, max_size=15)

# Milliseconds of ResNet-50 on two cores, five interleaved rounds: default, and mapped weights.
DEFAULT_FIRST = (228.4, 231.9, 230.2, 263.0, 229.7)
MAPPED_FIRST = (46.1, 47.3, 45.8, 46.0, 59.9)
STEADY = (18.1, 18.0, 18.3, 18.0, 18.2)


OBJECTIVE = per_load(1000)


def samples(first, steady=STEADY, *, private_mb=100.0):
    return tuple(
        ProbeResult(one, 0.8 * one, 0.2 * one, other, private_mb, 2 * private_mb)
        for one, other in zip(first, steady, strict=True)
    )


def scaled(values, factor):
    return tuple(value * factor for value in values)


def decided(prepared, *, default=None, portable=None, objective=OBJECTIVE):
    """Returns what ships; the default is what was measured, unless another one is given."""
    plans = {DEFAULT: default or samples(DEFAULT_FIRST), "prepared": prepared}
    if portable is not None:
        plans["portable"] = portable
    return decide(plans, candidates=("prepared", "portable"), objective=objective)


def test_the_prepared_plan_ships_when_it_is_sooner_and_as_fast():
    decision = decided(samples(MAPPED_FIRST), portable=samples(DEFAULT_FIRST))
    assert decision.shipped == "prepared"
    assert "5.0× sooner" in decision.reason
    assert "1.00×" in decision.reason


def test_a_gain_within_the_noise_ships_the_default_and_says_so():
    decision = decided(samples(scaled(DEFAULT_FIRST, 0.999)))
    assert decision.shipped == DEFAULT
    assert "not ready sooner beyond the noise" in decision.reason
    assert "230" in decision.reason
    said = "nothing prepared beats plain ONNX Runtime for 1000 runs per load: the bundle ships the source"
    assert decision.reason.startswith(said)


def test_a_plan_slower_per_run_gives_way_to_the_portable_one():
    slow = samples(MAPPED_FIRST, scaled(STEADY, 1.4))
    decision = decided(slow, portable=samples(scaled(MAPPED_FIRST, 1.5)))
    assert decision.shipped == "portable"
    assert "prepared takes 1.40× the time per run" in decision.reason


def test_a_plan_slower_per_run_by_less_than_the_allowance_ships():
    assert is_below(STEADY, scaled(STEADY, 1.025))
    assert decided(samples(MAPPED_FIRST, scaled(STEADY, 1.025))).shipped == "prepared"


def test_the_fallback_is_the_source_unless_the_portable_graph_is_better_beyond_the_noise():
    plans = {DEFAULT: samples(DEFAULT_FIRST), "prepared": samples(MAPPED_FIRST)}
    for first, steady, shipped in (
        (scaled(DEFAULT_FIRST, 0.999), STEADY, DEFAULT),
        (scaled(DEFAULT_FIRST, 0.7), scaled(STEADY, 1.4), DEFAULT),
        (scaled(DEFAULT_FIRST, 0.7), STEADY, "portable"),
    ):
        fallback = decide_fallback({**plans, "portable": samples(first, steady)}, objective=OBJECTIVE)
        assert fallback.shipped == shipped
    assert decide_fallback(plans, objective=OBJECTIVE) is None


def test_a_limit_of_the_target_s_plan_does_not_choose_the_fallback():
    plans = dict.fromkeys((DEFAULT, "portable"), samples(DEFAULT_FIRST, private_mb=300.0))
    fallback = decide_fallback(plans, objective=per_load(1000, max_private_mb=200.0))
    assert fallback.shipped == DEFAULT


def test_a_plan_is_judged_with_the_first_phase_that_serves_before_it():
    default, first = samples(DEFAULT_FIRST), samples(MAPPED_FIRST, scaled(STEADY, 2.0))
    assert decided(default).shipped == DEFAULT
    alone = {DEFAULT: default, "prepared": default}
    decision = decide({**alone, FIRST: first}, candidates=("prepared",), objective=OBJECTIVE)
    assert decision.shipped == "prepared"
    assert "by its first phase" in decision.reason
    slow = {DEFAULT: default, "prepared": samples(DEFAULT_FIRST, scaled(STEADY, 1.3)), FIRST: first}
    assert decide(slow, candidates=("prepared",), objective=OBJECTIVE).shipped == DEFAULT


def test_a_start_that_all_have_in_common_does_not_hide_what_differs():
    starts = {DEFAULT: (90.0, 140.0, 95.0, 150.0, 100.0), "prepared": (150.0, 95.0, 140.0, 90.0, 130.0)}
    own = {DEFAULT: (50.0, 52.0, 49.0, 51.0, 50.0), "prepared": (30.0, 31.0, 29.0, 30.0, 30.0)}
    measured = {
        name: tuple(
            ProbeResult(start + one, 0.8 * one, 0.2 * one, 18.0, 100.0, 200.0)
            for start, one in zip(starts[name], own[name], strict=True)
        )
        for name in starts
    }
    assert decide(measured, candidates=("prepared",), objective=OBJECTIVE).shipped == DEFAULT
    levelled = with_common_start(measured)
    assert decide(levelled, candidates=("prepared",), objective=OBJECTIVE).shipped == "prepared"
    assert levelled[DEFAULT][0].ready_ms == pytest.approx(115.0 + 50.0)


def test_a_failed_candidate_is_passed_over_and_without_a_default_nothing_is_claimed_to_be_faster():
    plans = {"prepared": samples(MAPPED_FIRST)}
    decision = decide(plans, candidates=("portable", "prepared"), objective=OBJECTIVE)
    assert decision.shipped == "prepared"
    assert "without a comparison" in decision.reason


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(0.3, 3), st.floats(0.5, 2), st.sampled_from((1, 30, 10_000)), st.integers(0, 10**6))
def test_no_plan_ships_that_truly_costs_more_than_the_default_or_runs_longer(first, steady, runs, seed):
    chance, objective = random.Random(seed), per_load(runs)

    def rounds_of(first_ms, steady_ms):
        figures = [(first_ms * noise(), steady_ms * noise()) for _ in range(7)]
        return samples(*(tuple(column) for column in zip(*figures, strict=True)))

    def noise():
        return math.exp(chance.gauss(0, 0.02))

    plans = {DEFAULT: rounds_of(230, 18), "prepared": rounds_of(230 * first, 18 * steady)}
    decision = decide(plans, candidates=("prepared",), objective=objective)
    cost = (230 * first + (runs - 1) * 18 * steady) / (230 + (runs - 1) * 18)
    if decision.shipped == "prepared":
        assert cost < 1.04 or (first < 1.04 and steady < 1.08)


def test_a_default_beyond_a_limit_is_no_way_out():
    heavy, limited = samples(DEFAULT_FIRST, private_mb=300.0), per_load(1000, max_private_mb=200.0)
    assert decided(samples(DEFAULT_FIRST), default=heavy).shipped == DEFAULT
    assert decided(samples(DEFAULT_FIRST), default=heavy, objective=limited).shipped == "prepared"


def test_a_plan_beyond_a_limit_gives_way_to_one_that_keeps_it():
    heavy, other = samples(MAPPED_FIRST, private_mb=300.0), samples(scaled(MAPPED_FIRST, 1.5))
    decision = decided(heavy, portable=other, objective=per_load(1000, max_private_mb=200.0))
    assert decision.shipped == "portable"
    assert "prepared exceeds its limits: private memory 300 MB, allowed 200" in decision.reason


# -- what a forked worker is compared with


@pytest.mark.parametrize("fork_ms", [1.0, 2.0, None])
def test_runs_of_a_forked_worker_that_are_slower_or_fail_are_told(tmp_path, monkeypatch, fork_ms):
    def measure(request, **_):
        if request.forked and fork_ms is None:
            raise ChildError("it died")
        return ProbeResult(100.0, 10.0, 5.0, fork_ms if request.forked else 1.0, 9.0, 9.0)

    monkeypatch.setattr(stage, "measure_plan", measure)
    monkeypatch.setattr(stage.StagedBundles, "stage", lambda *_, **__: Path("staged"))
    quick = MeasureSpec(rounds=3, cold_rounds=0, steady_s=0.01)
    context = build_context(tmp_path, spec=SPEC.model_copy(update={"measure": quick}))
    _, result = measured(context)
    assert ("forked failed: it died" in said(context)) == (fork_ms is None)
    last = result.measurements[0].plans[-1]
    assert (last.steady_ms.median if last.plan == "forked" else None) == fork_ms
    told = [line for line in said(context) if "a forked worker, on one thread, takes 2.00×" in line]
    assert len(told) == (fork_ms == 2)


@pytest.mark.slow
def test_plans_that_are_tuned_for_forks_are_compared_as_forks(tmp_path):
    quick = MeasureSpec(rounds=3, cold_rounds=0, steady_s=0.01)
    changes = {"tune": TuneSpec(max_trials=0, fork=True), "measure": quick}
    context = build_context(tmp_path, spec=SPEC.model_copy(update=changes))
    _, result = measured(context)
    assert result.decision.reason.startswith("as forked workers, on one thread: ")
    figures = {record.cache: {plan.plan: plan for plan in record.plans} for record in result.measurements}
    assert list(figures) == ["forked", "warm"]
    assert list(figures["forked"]) == ["default", "prepared", "portable"]
    for name, fork in figures["forked"].items():
        assert 0 < fork.ready_ms.median < figures["warm"][name].ready_ms.median / 2
        assert 0 < fork.private_mb.median < figures["warm"][name].private_mb.median / 2
