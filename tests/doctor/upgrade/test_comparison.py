from __future__ import annotations

from collections.abc import Sequence

from ortprep.children.probe import ProbeResult
from ortprep.doctor.upgrade.comparison import (
    UpgradeCase,
    describe_verdict,
    find_failures,
    find_remarks,
    judge_upgrade,
)
from ortprep.doctor.upgrade.session_check import SessionCheck
from ortprep.measuring.change import RegressionLimits

OLD, NEW = UpgradeCase("bundle", "1.31.1"), UpgradeCase("bundle", "1.32.0")
TAKEN = SessionCheck("cpu")


def measured(*ready_ms: float, steady_ms: float = 1.0, private_mb: float = 10.0) -> Sequence[ProbeResult]:
    return [
        ProbeResult(
            ready_ms=ready,
            import_ms=1,
            init_ms=1,
            first_ms=1,
            steady_ms=steady_ms,
            runs=5,
            private_mb=private_mb,
            peak_mb=20,
            gpu_mb=None,
            onnxruntime="1.31.1",
        )
        for ready in ready_ms
    ]


BASE = measured(50, 51, 52, 53, 54)


def failures_of(new: Sequence[ProbeResult], limits: RegressionLimits | None = None) -> tuple[str, ...]:
    runs = judge_upgrade({OLD: TAKEN, NEW: TAKEN}, {OLD: BASE, NEW: new}, limits or RegressionLimits())
    return find_failures(runs)


def test_what_is_worse_beyond_the_limit_and_the_noise_fails_by_name():
    (failure,) = failures_of(measured(70, 71, 72, 73, 74))
    assert (
        failure
        == "bundle on 1.32.0: ready, warm cache: 72 ms instead of 52 ms, 1.385×; expected at most 1.100×"
    )
    assert "steady" in failures_of(measured(50, 51, 52, 53, 54, steady_ms=1.2))[0]
    assert "private" in failures_of(measured(50, 51, 52, 53, 54, private_mb=11.5))[0]


def test_within_the_limit_or_the_noise_nothing_fails():
    assert failures_of(measured(54, 55, 56, 57, 58)) == ()
    assert failures_of(measured(40, 45, 90, 52, 95)) == ()
    assert failures_of(measured(70, 71, 72, 73, 74), RegressionLimits(share=0.5)) == ()


def test_a_version_that_does_not_load_or_answers_wrongly_fails_without_figures():
    runs = judge_upgrade({OLD: TAKEN, NEW: "does not answer as recorded"}, {OLD: BASE}, RegressionLimits())
    assert find_failures(runs) == ("bundle on 1.32.0: does not answer as recorded",)
    assert (runs[1].figures, runs[1].changes) == ({}, ())


def test_a_version_that_dies_while_it_is_measured_fails():
    runs = judge_upgrade({OLD: TAKEN, NEW: TAKEN}, {OLD: BASE, NEW: "child died"}, RegressionLimits())
    assert find_failures(runs) == ("bundle on 1.32.0: child died",)


def test_a_verdict_says_what_failed_and_what_was_not_compared():
    slow = measured(70, 71, 72, 73, 74)
    cases: list[tuple[SessionCheck | str, Sequence[ProbeResult], list[str]]] = [
        (TAKEN, BASE, ["baseline", "no worse"]),
        (TAKEN, slow, ["baseline", "worse: ready"]),
        (TAKEN, [], ["baseline", "fails"]),
        ("does not load", BASE, ["fails", "not compared"]),
    ]
    for old, new, expected in cases:
        checks = {OLD: old, NEW: TAKEN if new else "does not load"}
        results = ({OLD: BASE} if old is TAKEN else {}) | ({NEW: new} if new else {})
        runs = judge_upgrade(checks, results, RegressionLimits())
        assert [describe_verdict(run, OLD.version) for run in runs] == expected


def test_each_way_is_compared_with_itself():
    source = UpgradeCase("source", "1.31.1"), UpgradeCase("source", "1.32.0")
    checks = {OLD: TAKEN, NEW: TAKEN, source[0]: SessionCheck(), source[1]: SessionCheck()}
    slow = measured(90, 91, 92, 93, 94)
    runs = judge_upgrade(checks, {OLD: BASE, NEW: BASE, source[0]: slow, source[1]: slow}, RegressionLimits())
    assert find_failures(runs) == ()
    assert [change.ratio for change in runs[3].changes] == [1.0, 1.0, 1.0]


def test_another_variant_is_a_remark_with_its_reason():
    fallback = SessionCheck("portable", ("cpu: expected ONNX Runtime < 1.32, got 1.32.0",))
    (remark,) = find_remarks({OLD: TAKEN, NEW: fallback})
    assert remark == (
        "bundle on 1.32.0: takes variant portable; passed over cpu: expected ONNX Runtime < 1.32, got 1.32.0"
    )
