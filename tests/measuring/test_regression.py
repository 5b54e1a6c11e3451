"""The gate between two versions of a bundle: what fails, what never fails, and what cannot be compared."""

import dataclasses
import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.loader_config import MAX_VARIANTS, FileEntry
from ortprep.bundle.manifest import (
    MANIFEST_FILE,
    MANIFEST_SCHEMA_VERSION,
    Decision,
    Manifest,
    MeasurementRecord,
    OutputError,
    SourceRecord,
    VariantRecord,
    VerificationRecord,
    read_manifest,
    read_manifest_file,
    write_manifest,
)
from ortprep.errors import BundleError
from ortprep.measuring.change import MEASURED, RegressionLimits, judge
from ortprep.measuring.regression import compare as compare_versions

HERE = {"machine": "x86_64", "cpu_model": "processor", "cores": 4, "gpus": []}
FIELDS = {name: field for name, field in MEASURED.items() if name != "first-result"}
"""Figures that are recorded; the first result is the sum of two."""


def compare(old, new, **options):
    return compare_versions([old], [new], **options)


def exactly(value, *, count=5):
    return Samples((value,) * count)


def plan(name="prepared", **changed):
    figures = {field: exactly(10.0, count=9) for field in FIELDS.values()}
    return PlanFigures(plan=name, **{**figures, **changed})


def measured(*plans, cache="warm", shapes="x=[1,3]"):
    return (MeasurementRecord(cache, 5, shapes, plans or (plan(),)),)


def variant(name="cpu", *, target="cpu", error=0.1, **changed):
    worst = OutputError("y", "x=[1,3]", 1e-4, 1e-4, (0,), 1.0, 1.0, error)
    verification = VerificationRecord(1e-3, 1e-5, 1, "seeded", (worst,), ())
    measurements = measured() if name != "portable" else ()
    record = VariantRecord(name, target, "all", (), verification, measurements, Decision("prepared", ""))
    return dataclasses.replace(record, **changed)


def manifest(*variants, hardware=HERE, sizes=None, **changed):
    variants = variants or (variant(), variant("portable"))
    sizes = {one.name: 2**20 for one in variants} if sizes is None else sizes
    found = Manifest(
        schema_version=MANIFEST_SCHEMA_VERSION,
        name="net",
        created_at="2026-11-20T00:00:00+00:00",
        pipeline_version="0.1.0",
        spec_digest="sha256:spec",
        source=SourceRecord("path", "m.onnx", "sha256:source", (), {"": 17}, 8, {"Conv": 1}, 1024),
        environment={"onnxruntime": "1.31.1", "hardware": hardware},
        variants=variants,
        files=tuple(FileEntry(f"{name}/m.onnx", size, "sha256:m") for name, size in sizes.items()),
    )
    return dataclasses.replace(found, **changed)


def with_figure(figure, summary):
    """Returns a bundle of one variant, with that figure."""
    figures = dataclasses.replace(plan(), **{FIELDS[figure]: summary})
    return manifest(variant(measurements=measured(figures)))


def verdicts(comparison):
    """Returns what became of the first variant's figures, by their names."""
    return {change.figure: change.verdict for change in comparison.variants[0].changes}


positive = st.floats(1e-3, 1e6)
summaries = st.lists(positive, min_size=1, max_size=9).map(Samples.of)
anything = summaries | st.sampled_from([exactly(math.nan), exactly(math.inf), exactly(0.0), exactly(-1.0)])
plans = st.builds(
    PlanFigures, plan=st.sampled_from(["prepared", "default"]), ready_ms=anything,
    init_ms=anything, first_ms=anything, steady_ms=anything,
    private_mb=anything, peak_mb=anything,
    gpu_mb=st.none() | anything,
)  # fmt: skip
measurements = st.builds(
    MeasurementRecord,
    st.sampled_from(["warm", "cold"]),
    st.integers(1, 9),
    st.just("x=[1]"),
    st.tuples(plans),
)
variants = st.builds(
    variant,
    st.sampled_from(["cpu", "cuda", "portable"]),
    target=st.sampled_from(["cpu", "cuda"]),
    error=st.floats(0, 3) | st.just(math.nan) | st.just(math.inf),
    measurements=st.lists(measurements, max_size=2).map(tuple),
)
manifests = st.lists(variants, min_size=1, max_size=3, unique_by=lambda one: one.name).map(
    lambda found: manifest(*found)
)


# What never fails, and what always does


@given(manifests)
def test_a_bundle_compared_with_itself_never_fails(one):
    comparison = compare(one, one)
    assert comparison.outcome == "ok"
    for of_variant in comparison.variants:
        assert (of_variant.failures, of_variant.hardware) == ((), ())
        assert {change.verdict for change in of_variant.changes} <= {"within the limit"}


@given(summaries, summaries, st.floats(0, 2))
def test_an_improvement_read_backwards_is_a_regression(one, other, limit):
    backwards = {"improvement": "regression", "regression": "improvement"}
    forwards = judge(one, other, limit=limit)
    assert judge(other, one, limit=limit) == backwards.get(forwards, forwards)


@given(st.sampled_from(sorted(FIELDS)), summaries, summaries, st.floats(0, 2))
def test_nothing_within_the_limit_fails(figure, old, new, limit):
    comparison = compare(with_figure(figure, old), with_figure(figure, new), limits=RegressionLimits(limit))
    if new.median <= old.median * (1 + limit):
        assert comparison.outcome == "ok"
        assert verdicts(comparison)[figure] in ("within the limit", "improvement", "within the noise")


@given(st.sampled_from(sorted(FIELDS)), positive, st.floats(0, 1), st.floats(0.01, 1))
def test_what_is_beyond_the_limit_and_the_noise_always_fails(figure, old, limit, beyond):
    new = old * (1 + limit) * (1 + beyond)
    comparison = compare(
        with_figure(figure, exactly(old)), with_figure(figure, exactly(new)), limits=RegressionLimits(limit)
    )
    assert comparison.outcome == "regression"
    assert comparison.variants[0].failures[0].startswith(f"{figure}, warm cache: ")


@given(st.sampled_from(sorted(FIELDS)), summaries, summaries)
def test_what_is_worse_within_the_noise_is_shown_and_does_not_fail(figure, old, new):
    comparison = compare(with_figure(figure, old), with_figure(figure, new), limits=RegressionLimits(0.0))
    if min(old.count, new.count) >= 3 and old.p75 >= new.p25:
        assert comparison.outcome == "ok"
        if new.median > old.median:
            assert verdicts(comparison)[figure] == "within the noise"


@given(manifests, st.data())
def test_a_vanished_variant_always_fails(old, data):
    gone = data.draw(st.integers(0, len(old.variants) - 1))
    left = (*old.variants[:gone], *old.variants[gone + 1 :])
    comparison = compare(old, dataclasses.replace(old, variants=left))
    assert comparison.outcome == "regression"


@given(manifests, st.data())
def test_of_a_partial_bundle_what_is_there_is_compared_and_nothing_is_not_enough(old, data):
    left = tuple(one for one in old.variants if data.draw(st.booleans()))
    comparison = compare(old, dataclasses.replace(old, variants=left), partial=True)
    assert comparison.outcome == ("ok" if left else "regression")


@given(manifests, variants)
def test_a_new_variant_fails_only_if_it_answers_wrongly(old, added):
    added = dataclasses.replace(added, name="added")
    comparison = compare(old, dataclasses.replace(old, variants=(*old.variants, added)))
    error = added.verification.errors[0].ratio
    assert comparison.outcome == ("ok" if error <= 1 else "regression")


def test_of_a_new_variant_what_is_counted_is_shown():
    added = variant("added", measurements=(*measured(), *measured(cache="cold")))
    _, new = compare(manifest(variant()), manifest(variant(), added)).variants
    assert [(one.figure, one.cache) for one in new.changes] == [("size", ""), ("verification", "")]


@pytest.mark.parametrize("figure", FIELDS)
def test_a_vanished_figure_fails(figure):
    lost = None if figure == "gpu" else exactly(math.nan)
    comparison = compare(manifest(variant()), with_figure(figure, lost))
    assert comparison.outcome == "regression"
    assert comparison.variants[0].failures[0].startswith(f"missing, warm cache: {figure}")


def test_measurements_that_vanished_fail_and_new_ones_do_not():
    cold = measured(cache="cold")
    warm, both = manifest(variant()), manifest(variant(measurements=(*measured(), *cold)))
    assert compare(warm, both).outcome == "ok"
    (failure,) = compare(both, warm).variants[0].failures
    assert failure.startswith("missing, cold cache: ready, init, first-run")


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        (0.1, 0.99, "ok"),
        (0.1, 1.0, "ok"),
        (0.1, 1.01, "regression"),
        (0.1, math.nan, "regression"),
        (0.1, math.inf, "regression"),
        (1.2, 1.3, "ok"),
        (math.nan, 0.5, "ok"),
    ],
)
def test_answers_fail_beyond_their_tolerance_and_were_not_before(old, new, outcome):
    assert compare(manifest(variant(error=old)), manifest(variant(error=new))).outcome == outcome


def test_answers_that_are_compared_with_nothing_fail():
    unverified = variant(verification=VerificationRecord(1e-3, 1e-5, 0, "seeded", (), ()))
    assert compare(manifest(variant()), manifest(unverified)).outcome == "regression"


def test_every_byte_of_the_size_counts_and_each_figure_may_have_a_limit():
    verified = manifest(variant(error=0.1)), manifest(variant(error=0.2))
    assert compare(*verified).outcome == "ok"
    limits = RegressionLimits(by_figure={"verification": 0.5})
    assert compare(*verified, limits=limits).outcome == "regression"
    pair = manifest(variant(), sizes={"cpu": 1000}), manifest(variant(), sizes={"cpu": 1101})
    assert compare(*pair).outcome == "regression"
    assert compare(*pair, limits=RegressionLimits(by_figure={"size": 0.2})).outcome == "ok"


def test_what_is_shipped_is_what_is_compared():
    plans = plan("default", init_ms=exactly(90.0)), plan("prepared")
    prepared = variant(measurements=measured(*plans))
    default = variant(measurements=measured(*plans), decision=Decision("default", ""))
    comparison = compare(manifest(prepared), manifest(default))
    assert verdicts(comparison)["init"] == "regression"


# The noise


@pytest.mark.parametrize(
    ("rounds", "scatter", "most"), [(2, 0.05, 0.04), (3, 0.05, 0.03), (5, 0.05, 0.01), (5, 0.1, 0.07)]
)
def test_of_equal_bundles_one_is_seldom_called_worse(rounds, scatter, most):
    chance = random.Random(7)

    def noisy():
        return Samples.of([math.exp(chance.gauss(0, scatter)) for _ in range(rounds)])

    calls = [judge(noisy(), noisy(), limit=0.1) == "regression" for _ in range(4000)]
    assert sum(calls) / len(calls) < most


# Hardware and inputs


@pytest.mark.parametrize("changed", [{"cpu_model": "other"}, {"cores": 8}, {"machine": "aarch64"}], ids=str)
def test_figures_of_different_hardware_are_not_compared(changed):
    slow = variant(measurements=measured(plan(init_ms=exactly(90.0))))
    answers_wrongly = manifest(variant(error=2.0), hardware=HERE | changed)
    assert compare(manifest(variant()), answers_wrongly).outcome == "regression", "on any hardware"
    pair = manifest(variant()), manifest(slow, hardware=HERE | changed)
    comparison = compare(*pair)
    assert comparison.outcome == "not comparable"
    assert "different hardware" in comparison.variants[0].failures[0]
    assert verdicts(comparison) == dict.fromkeys(MEASURED, "not comparable") | {
        "size": "within the limit",
        "verification": "within the limit",
    }


def test_the_gpu_matters_for_what_runs_on_it_alone():
    gpus = [[{"name": name, "compute_capability": [9, 0]}] for name in ("H100", "H200")]
    for target, outcome in (("cpu", "ok"), ("cuda", "not comparable")):
        pair = [manifest(variant(target, target=target), hardware=HERE | {"gpus": gpu}) for gpu in gpus]
        assert compare(*pair).outcome == outcome


@pytest.mark.parametrize("unknown", [None, {}, "x86_64", [], {"gpus": {}}], ids=str)
def test_hardware_that_was_not_recorded_is_not_the_same_hardware(unknown):
    recorded = manifest(variant("cuda", target="cuda"))
    assert compare(recorded, manifest(variant("cuda", target="cuda"), hardware=unknown)).outcome == (
        "not comparable"
    )


def test_figures_of_different_inputs_are_not_compared():
    larger = variant(measurements=measured(shapes="x=[8,3]"))
    comparison = compare(manifest(variant()), manifest(larger))
    assert comparison.outcome == "not comparable"
    assert "inputs of different shapes" in comparison.variants[0].failures[0]


def test_a_variant_is_compared_with_that_of_the_same_hardware_in_whatever_order():
    gpus = {name: HERE | {"gpus": [{"name": name, "compute_capability": [9, 0]}]} for name in ("A", "B")}

    def prepared_on(*names):
        return [manifest(variant("cuda", target="cuda"), hardware=gpus[name]) for name in names]

    comparison = compare_versions(prepared_on("A", "B"), prepared_on("B", "A"))
    assert [(one.old, one.new, one.outcome) for one in comparison.variants] == [
        ("cuda", "cuda (2)", "ok"),
        ("cuda (2)", "cuda", "ok"),
    ]


@pytest.mark.attack
def test_f10_a_manifest_of_more_variants_than_a_build_makes_is_refused(tmp_path):
    many = [variant(f"v{index}") for index in range(MAX_VARIANTS + 1)]
    write_manifest(tmp_path, manifest(*many[1:], sizes={}))
    assert len(read_manifest(tmp_path).variants) == MAX_VARIANTS
    write_manifest(tmp_path, manifest(*many, sizes={}))
    for read in (read_manifest, lambda folder: read_manifest_file(folder / MANIFEST_FILE)):
        with pytest.raises(BundleError, match=r"too many variants .*\n.*at most 256, got 257"):
            read(tmp_path)


@pytest.mark.attack
@pytest.mark.parametrize("depth", [1, 200])
def test_many_variants_and_facts_of_strangers_are_compared_in_seconds(depth):
    facts = {f"{index:x}": index for index in range(50_000)}
    for _ in range(depth):
        facts = {"x" * 10_000: facts, "": {"": 0}}
    sizes = {f"v{index}": 1 for index in range(50_000)}
    old = [
        manifest(
            *(variant(f"v{index}") for index in range(64)),
            sizes=sizes,
            environment={"hardware": HERE | {"cores": machine}, "odd": facts, "machine": machine},
        )
        for machine in range(8)
    ]
    begun_s = time.monotonic()
    comparison = compare_versions(old, [old[0], *(dataclasses.replace(one, variants=()) for one in old[1:])])
    assert [one.outcome for one in comparison.variants] == ["ok"] * 64 + ["regression"] * 7 * 64
    assert time.monotonic() - begun_s < 10
