"""Ways to load a model, compared: verdicts on made-up figures, and the real thing on a small model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.children.probe import ProbeResult
from ortprep.doctor.sampling import examine_bundle, examine_source
from ortprep.doctor.variations import MEASURES, compare, diagnose_options, find_in_comparison
from tests.builders import conv_net, write_model
from tests.runtime.builders import write_bundle

NOISE = (1.0, 0.99, 1.01, 1.005, 0.995)


def results(init_ms: float, *, steady_ms: float = 8.0, noise: tuple[float, ...] = NOISE) -> list[ProbeResult]:
    one = ProbeResult(
        ready_ms=init_ms + 130.0,
        import_ms=100.0,
        init_ms=init_ms,
        first_ms=10.0,
        steady_ms=steady_ms,
        runs=9,
        private_mb=64.0,
        peak_mb=99.0,
        gpu_mb=None,
        onnxruntime="1.31.1",
    )
    return [
        replace(one, init_ms=init_ms * x, first_ms=10.0 * x, steady_ms=steady_ms * x, private_mb=64.0 * x)
        for x in noise
    ]


def codes(found: dict[str, list[ProbeResult]], *, prepared: bool = False) -> dict[str, str]:
    return {one.code: one.text for one in find_in_comparison(compare(found), prepared=prepared)}


def test_a_sooner_way_is_advised_with_its_figures():
    found = codes({"default": results(300.0), "mapped": results(20.0), "no optimisation": results(200.0)})
    assert found["sooner-without-slower-runs"].startswith("mapped: first result 10.3× sooner")


def test_a_way_with_slower_runs_is_not_advised():
    found = codes({"default": results(300.0), "raw": results(20.0, steady_ms=12.0)})
    assert "default-is-as-good" in found
    assert "1.50×" in found["slower-runs"]


def test_a_bundle_that_is_soonest_is_as_it_should_be():
    found = codes({"default": results(300.0), "prepared": results(20.0)}, prepared=True)
    assert "prepared-is-soonest" in found


def test_nothing_is_said_of_noise_with_fewer_than_three_rounds():
    found = compare({"default": results(300.0, noise=(1, 1)), "mapped": results(20.0, noise=(1, 1))})
    assert {one.verdict for one in found["mapped"].values()} == {"too few rounds"}
    assert set(codes({"default": results(9.0, noise=(1,)), "x": results(1.0, noise=(1,))})) == {
        "too-few-rounds"
    }


def test_without_the_default_nothing_is_compared():
    assert compare({"mapped": results(20.0)}) == {}
    assert "nothing-compared" in codes({"mapped": results(20.0)})


@given(st.floats(1, 1e4), st.floats(1, 1e4))
def test_less_one_way_round_is_more_the_other(one, other):
    ways = {"a": results(one), "b": results(other)}
    there = compare({"default": ways["a"], "x": ways["b"]})["x"]
    back = compare({"default": ways["b"], "x": ways["a"]})["x"]
    mirrored = {"less": "more", "more": "less"}
    for measure in MEASURES:
        assert back[measure].verdict == mirrored.get(there[measure].verdict, there[measure].verdict)
        assert there[measure].ratio * back[measure].ratio == pytest.approx(1)


@pytest.fixture
def subject(tmp_path):
    return examine_source(write_model(conv_net(), tmp_path / "conv.onnx"), tmp_path)


@pytest.mark.slow
def test_a_bundle_alone_is_compared_with_nothing(tmp_path):
    found = diagnose_options(examine_bundle(write_bundle(tmp_path / "linear"), tmp_path), rounds=1)
    assert set(found.figures["results"]) == {"prepared"}
    (finding,) = found.findings
    assert finding.code == "nothing-compared"
    assert finding.hint


@pytest.mark.slow
def test_a_way_that_fails_is_named_and_the_others_go_on(tmp_path, subject):
    spoilt = replace(subject, sample=str(tmp_path / "nothing.npz"))
    found = diagnose_options(spoilt, rounds=1)
    assert "cannot-be-loaded" in {one.code for one in found.findings if one.severity == "problem"}
    assert "nothing-compared" in {one.code for one in found.findings}
