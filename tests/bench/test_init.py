"""What `bench.init` says of a folder of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.init import InitOutcome, summarize, try_models
from tests import builders as models
from tests.init.builders import impossible


def test_every_group_is_counted_on_its_own() -> None:
    def outcome(group: str, *, verified: bool) -> InitOutcome:
        return InitOutcome("m.onnx", group, 1, written=True, ran=True, verified=verified, init_s=1.0, said="")

    outcomes = [
        outcome("seen", verified=True),
        outcome("unseen", verified=True),
        outcome("unseen", verified=False),
    ]
    assert summarize(outcomes) == {
        "seen": {"models": 1, "written": 1, "ran": 1, "verified": 1},
        "unseen": {"models": 2, "written": 2, "ran": 2, "verified": 1},
    }


@pytest.mark.slow
def test_models_are_taken_as_far_as_they_come(tmp_path: Path) -> None:
    models.write_model(models.conv_net(), tmp_path / "models" / "good" / "net.onnx")
    models.write_model(impossible(), tmp_path / "models" / "bad" / "odd.onnx")
    found = {one.model: one for one in try_models(tmp_path / "models", tmp_path / "work")}
    good, bad = found["good/net.onnx"], found["bad/odd.onnx"]
    assert (good.group, good.written, good.ran, good.verified, good.said) == ("good", True, True, True, "")
    assert (bad.written, bad.ran, bad.verified) == (True, False, False)
    assert "which shape does input x" in bad.said
