"""Trials in real processes: what a plan costs, or why it has no cost."""

import dataclasses

import numpy as np
import pytest

from ortprep.bundle.loader_config import Tolerance
from ortprep.children.answers import write_answers
from ortprep.errors import VerificationError
from ortprep.runtime.loading.session import CPU, default_plan
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.tuning.trial import TrialRequest, measure_trial
from tests.runtime.builders import write_linear

TIMEOUT_S = 300.0


@pytest.fixture(scope="session")
def request_of_all(tmp_path_factory):
    """A matrix product on two batch sizes, as plain ONNX Runtime runs it, with the answers it gave."""
    folder = tmp_path_factory.mktemp("trial")
    weights = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    model, _ = write_linear(folder / "linear.onnx", weights)
    files = []
    for batch in (1, 3):
        files.append(folder / f"{batch}.npz")
        write_tensors(files[-1], {"x": np.random.default_rng(batch).random((batch, 64), np.float32)})
    plan = default_plan(str(model), CPU, level="ORT_DISABLE_ALL")
    answers = write_answers(plan, files, folder / "answers", timeout_s=TIMEOUT_S)
    first, *others = map(str, files)
    return TrialRequest(
        plan,
        first,
        steady_s=0.001,
        more_samples=tuple(others),
        answers=answers.samples,
        tolerances={"": Tolerance(1e-3, 1e-5)},
    )


def measured(request):
    return measure_trial(request, timeout_s=TIMEOUT_S, memory_bytes=16 * 2**30)


def with_other_weights(request, folder):
    """Returns the same plan over a model one of whose weights is a little off."""
    weights = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    weights[5, 7] += 0.5
    model, _ = write_linear(folder / "linear.onnx", weights)
    return dataclasses.replace(request, plan=request.plan._replace(model=str(model)))


def test_figures_are_those_of_a_small_process(request_of_all):
    figures = measured(request_of_all)
    assert all(value > 0 for value in (figures.init_ms, figures.first_ms, figures.steady_ms))
    assert figures.first_result_ms == figures.init_ms + figures.first_ms < TIMEOUT_S * 1e3
    assert 1 < figures.private_mb < 2000
    assert figures.private_mb < figures.peak_mb < 4000
    assert figures.gpu_mb is None


def test_a_wrong_answer_is_an_error_that_names_output_and_element(request_of_all, tmp_path):
    with pytest.raises(VerificationError, match=r"wrong answer: output 'y', ") as caught:
        measured(with_other_weights(request_of_all, tmp_path))
    assert "\n  expected " in caught.value.message
    assert " at [0, 7], got " in caught.value.message


def test_every_output_to_every_shape_is_compared(request_of_all, tmp_path):
    first, (second,) = request_of_all.answers
    other = np.load(second.file)
    other[2, 9] += 1
    np.save(tmp_path / "y.npy", other)
    for expected, said in (
        ((first, (dataclasses.replace(second, file=str(tmp_path / "y.npy")),)), r"at \[2, 9\]"),
        ((tuple(dataclasses.replace(one, output="z") for one in first), (second,)), "does not return output"),
    ):
        with pytest.raises(VerificationError, match=said):
            measured(dataclasses.replace(request_of_all, answers=expected))


def test_an_output_has_the_tolerance_of_its_name(request_of_all, tmp_path):
    tolerances = {**request_of_all.tolerances, "y": Tolerance(0.0, 10.0)}
    wrong = with_other_weights(request_of_all, tmp_path)
    assert measured(dataclasses.replace(wrong, tolerances=tolerances)).steady_ms > 0
