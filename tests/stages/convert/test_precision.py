"""Which samples calibrate a precision, and which judge it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ortprep.bundle.conversion_record import PrecisionStep
from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.model_facts import ModelInterface
from ortprep.children.answers import Answer, Answers
from ortprep.errors import StageError
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.spec.validation import parse_spec
from ortprep.stages.convert import precision as module
from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.convert.precision import PrecisionAttempts
from ortprep.stages.core.contract import Context, Plan, TaskId
from ortprep.stages.core.fallback import TAKEN
from ortprep.stages.core.inputs.samples import Sample
from ortprep.stages.verify.reference import ReferenceAnswers

REAL = 6


@pytest.fixture
def judged(monkeypatch):
    """Returns how many samples calibrated and judged each pass that was tried; all of them are refused."""
    found: dict[str, tuple[int, int]] = {}
    requests: list[PassRequest] = []

    def convert(_context: object, request: PassRequest) -> PassReply:
        requests.append(request)
        return cast("PassReply", SimpleNamespace(converted=("node",), kept=(), nodes=1, too_large=()))

    def judge(_spec: object, samples: tuple[Sample, ...], *, expected: Answers, got: object) -> object:
        assert len(expected.samples) == len(samples) == got
        found[requests[-1].name] = len(requests[-1].samples), len(samples)
        return SimpleNamespace(failures=("cosine 0.5",), outputs=())

    def answer(_plan: object, samples: list[Path], _folder: Path, **_options: object) -> int:
        return len(samples)

    monkeypatch.setattr(module, "run_pass", convert)
    monkeypatch.setattr(module, "judge_accuracy", judge)
    monkeypatch.setattr(module, "write_answers", answer)
    return found


def attempts_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variant: str, **convert: Any
) -> PrecisionAttempts:
    """Returns the attempts at a variant of a model with real samples."""
    samples = []
    for number in range(REAL):
        write_tensors(folder / f"{number}.npz", {"x": np.full(4, number, np.float32)})
        samples.append(Sample(str(folder / f"{number}.npz"), "x=[4]", 4, number))
    answers = Answers((), (), tuple((Answer("y", sample.file),) for sample in samples))
    monkeypatch.setattr(
        module, "read_reference", lambda _folder: ReferenceAnswers(tuple(samples), answers, ())
    )
    search = {"max_trials": 0}
    spec = parse_spec({"name": "m", "source": {"path": "m.onnx"}, "convert": {"search": search, **convert}})
    plan = Plan(spec, ("cpu",), {})
    upstream = {TaskId("verify", "cpu"): SimpleNamespace(folder=folder)}
    context = Context(plan, variant, cast("Any", upstream), folder, lambda _line: None)
    x, y = (TensorSpec(name, "float32", (4,)) for name in "xy")
    interface = ModelInterface((x,), (y,), {}, external=False)
    description = SimpleNamespace(interface=interface, source=SimpleNamespace(operators={"Conv": 3}))
    parent = SimpleNamespace(description=description, path=folder / "m.onnx", folder=folder)
    return PrecisionAttempts(context, folder, cast("Any", parent))


def test_only_static_int8_is_judged_by_half_of_the_samples(tmp_path, monkeypatch, judged):
    convert = {"precision": "int8", "ladder": ["int8", "fp16"]}
    attempts = attempts_of(tmp_path, monkeypatch, "cpu-int8", **convert)
    steps = [attempts.try_step("int8"), attempts.try_step("fp16")]
    assert judged == {"int8-static": (3, 3), "fp16": (0, REAL)}
    calibrated_on, judged_on = attempts.sample_sets(steps)
    assert calibrated_on is None
    assert judged_on is not None
    assert judged_on.count == REAL
    taken = PrecisionStep("int8", TAKEN, made_by="int8-static")
    assert [one and one.count for one in attempts.sample_sets([taken])] == [3, 3]


def test_samples_that_calibrate_nothing_may_have_any_numbers(tmp_path, monkeypatch, judged):
    def refuse(*_arguments: object) -> None:
        raise StageError("bad calibration sample")

    monkeypatch.setattr(module, "check_calibration", refuse)
    attempts_of(tmp_path, monkeypatch, "cpu-fp16", precision="fp16").try_step("fp16")
    assert judged == {"fp16": (0, REAL)}
