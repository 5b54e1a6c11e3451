"""The benchmarks' own arithmetic: applications on bundles, models without specs."""

import json
from dataclasses import asdict, replace

import pytest

from bench.dropin import PLAIN, RUN, VARIABLES, agrees, report
from bench.init import InitOutcome, add_outcomes, main, summarize, try_models
from tests import builders as models
from tests.init.builders import impossible


def runs(*, first_ms=900.0, answer="total"):
    """Three processes on a machine that changes its speed."""
    return [
        {"first_ms": first_ms * speed, "whole_ms": 1200 * speed, "call_ms": 80 * speed, "answer": answer}
        for speed in (1.0, 1.4, 0.9)
    ]


@pytest.mark.parametrize(
    ("first_ms", "verdict"), [(500.0, "better"), (900.0, "no difference"), (1500.0, "worse")]
)
def test_a_way_is_better_or_worse_beyond_the_noise_only(first_ms, verdict):
    found = report({PLAIN: runs(), RUN: runs(first_ms=first_ms), VARIABLES: runs()})
    assert found["figures"]["first_ms"][RUN]["verdict"] == verdict
    assert found["figures"]["first_ms"][RUN]["to_plain"] == pytest.approx(first_ms / 900)
    assert found["figures"]["whole_ms"][VARIABLES]["verdict"] == "no difference"


def test_one_answer_that_differs_is_told():
    assert report({PLAIN: runs(), RUN: runs(), VARIABLES: runs()})["answers_agree"]
    assert not report({PLAIN: runs(), RUN: runs(answer="tota1"), VARIABLES: runs()})["answers_agree"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, "a", {"x": 0.5}], [1, "a", {"x": 0.50001}], True),
        ([0.5], [0.6], False),
        ([1], [2], False),
        ([1, 2], [1], False),
        ({"x": 1}, {"y": 1}, False),
    ],
)
def test_numbers_agree_within_rounding_and_all_else_exactly(one, other, expected):
    assert agrees(one, other) is expected


# -- what `bench.init` says of a folder of models


def outcome(model, group, *, verified):
    return InitOutcome(
        model,
        group,
        1,
        written=True,
        ran=True,
        verified=verified,
        first_verified=verified,
        init_s=1.0,
        said="",
    )


def test_every_group_is_counted_on_its_own():
    outcomes = [
        outcome("a.onnx", "seen", verified=True),
        outcome("b.onnx", "unseen", verified=True),
        outcome("c.onnx", "unseen", verified=False),
    ]
    assert summarize(outcomes) == {
        "seen": {"models": 1, "written": 1, "ran": 1, "verified": 1, "first_verified": 1},
        "unseen": {"models": 2, "written": 2, "ran": 2, "verified": 1, "first_verified": 1},
    }


def test_a_new_row_keeps_the_first_try_of_its_model():
    failed, mended = (outcome("b.onnx", "unseen", verified=one) for one in (False, True))
    other = outcome("a.onnx", "exported", verified=True)
    assert add_outcomes([failed], [mended, other]) == [other, replace(mended, first_verified=False)]


def test_rows_of_an_earlier_result_are_kept(tmp_path):
    result, row = tmp_path / "init.json", outcome("a.onnx", "demo", verified=True)
    result.write_text(json.dumps({"models": [asdict(row)]}), encoding="utf-8")
    (tmp_path / "models").mkdir()
    assert main([str(tmp_path / "models"), "--out", str(result)]) == 0
    assert json.loads(result.read_text(encoding="utf-8"))["models"] == [asdict(row)]


@pytest.mark.manual
def test_models_are_taken_as_far_as_they_come(tmp_path):
    models.write_model(models.conv_net(), tmp_path / "models" / "good" / "net.onnx")
    models.write_model(impossible(), tmp_path / "models" / "bad" / "odd.onnx")
    found = {one.model: one for one in try_models(tmp_path / "models", tmp_path / "work")}
    good, bad = found["good/net.onnx"], found["bad/odd.onnx"]
    assert (good.group, good.written, good.ran, good.verified, good.said) == ("good", True, True, True, "")
    assert (bad.written, bad.ran, bad.verified) == (True, False, False)
    assert "which shape does input x" in bad.said
