"""What `bench.init` says of a folder of models."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.init import InitOutcome, add_outcomes, main, summarize, try_models
from tests import builders as models
from tests.init.builders import impossible


def outcome(model: str, group: str, *, verified: bool) -> InitOutcome:
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


def test_every_group_is_counted_on_its_own() -> None:
    outcomes = [
        outcome("a.onnx", "seen", verified=True),
        outcome("b.onnx", "unseen", verified=True),
        outcome("c.onnx", "unseen", verified=False),
    ]
    assert summarize(outcomes) == {
        "seen": {"models": 1, "written": 1, "ran": 1, "verified": 1, "first_verified": 1},
        "unseen": {"models": 2, "written": 2, "ran": 2, "verified": 1, "first_verified": 1},
    }


def test_a_new_row_keeps_the_first_try_of_its_model() -> None:
    failed, mended = (outcome("b.onnx", "unseen", verified=one) for one in (False, True))
    other = outcome("a.onnx", "exported", verified=True)
    assert add_outcomes([failed], [mended, other]) == [other, replace(mended, first_verified=False)]


def test_rows_of_an_earlier_result_are_kept(tmp_path: Path) -> None:
    result, row = tmp_path / "init.json", outcome("a.onnx", "demo", verified=True)
    result.write_text(json.dumps({"models": [asdict(row)]}), encoding="utf-8")
    (tmp_path / "models").mkdir()
    assert main([str(tmp_path / "models"), "--out", str(result)]) == 0
    assert json.loads(result.read_text(encoding="utf-8"))["models"] == [asdict(row)]


@pytest.mark.manual
def test_models_are_taken_as_far_as_they_come(tmp_path: Path) -> None:
    models.write_model(models.conv_net(), tmp_path / "models" / "good" / "net.onnx")
    models.write_model(impossible(), tmp_path / "models" / "bad" / "odd.onnx")
    found = {one.model: one for one in try_models(tmp_path / "models", tmp_path / "work")}
    good, bad = found["good/net.onnx"], found["bad/odd.onnx"]
    assert (good.group, good.written, good.ran, good.verified, good.said) == ("good", True, True, True, "")
    assert (bad.written, bad.ran, bad.verified) == (True, False, False)
    assert "which shape does input x" in bad.said
