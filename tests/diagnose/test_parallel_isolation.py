"""A process of its own sees the one GPU it is for."""

from __future__ import annotations

import pytest

from pipeline.diagnose.parallel.isolation import isolate
from pipeline.diagnose.parallel.processes import run_together
from pipeline.diagnose.subject import plan_on


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_plan_for_the_cpu_stays_as_it_is() -> None:
    plan = plan_on("m.onnx", "cpu")
    assert isolate(plan) == (plan, {})


def test_in_its_process_the_third_gpu_is_the_first() -> None:
    plan, environment = isolate(plan_on("m.onnx", "cuda:2", provider_options={"use_tf32": "0"}))
    assert environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert plan == plan_on("m.onnx", "cuda:0", provider_options={"use_tf32": "0"})


def test_what_is_hidden_stays_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    _, environment = isolate(plan_on("m.onnx", "cuda:1"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "7"


def test_every_process_gets_its_own_environment() -> None:
    answers = run_together(
        f"{__name__}:say", [{}, {}], participants=2, environments=[{"WHICH": "a"}, {"WHICH": "b"}]
    )
    assert [value["which"] for value in answers.values] == ["a", "b"]


def say(request: object) -> dict[str, str]:
    """Runs in a child."""
    import os

    return {"which": os.environ["WHICH"]}
