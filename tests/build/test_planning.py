"""Which targets are built: named ones or an error, automatic ones as the machine has them."""

from __future__ import annotations

from typing import Any

import pytest

from ortprep.build.build_plan import build_plan, build_plans
from ortprep.errors import SpecError
from ortprep.spec.models import ModelSpec


def spec(targets: Any, name: str = "m") -> ModelSpec:
    return ModelSpec.model_validate({"name": name, "source": {"path": "m.onnx"}, "targets": targets})


def no_gpu(target: str) -> str | None:
    return "no NVIDIA driver" if target == "cuda" else None


def everything(target: str) -> str | None:
    return None


def test_auto_takes_what_is_there_the_fastest_first() -> None:
    assert build_plan(spec("auto"), unavailable_reason=no_gpu).targets == ("cpu",)
    assert build_plan(spec("auto"), unavailable_reason=everything).targets == ("cuda", "cpu")


def test_auto_does_not_call_a_target_missing() -> None:
    assert build_plan(spec("auto"), unavailable_reason=no_gpu).missing == {}


def test_a_named_target_that_is_not_there_is_an_error_with_a_command() -> None:
    with pytest.raises(SpecError, match="cuda: no NVIDIA driver") as caught:
        build_plan(spec(["cpu", "cuda"]), unavailable_reason=no_gpu)
    assert caught.value.hint == "ortprep prepare m --skip-unavailable"


def test_skipping_builds_the_rest_and_says_what_is_missing() -> None:
    plan = build_plan(spec(["cpu", "cuda"]), unavailable_reason=no_gpu, skip_unavailable=True)
    assert (plan.targets, dict(plan.missing)) == (("cpu",), {"cuda": "no NVIDIA driver"})


@pytest.mark.parametrize("skip_unavailable", [False, True])
def test_skipping_everything_is_an_error_and_never_its_own_remedy(skip_unavailable: bool) -> None:
    with pytest.raises(SpecError, match="not available") as caught:
        build_plan(spec(["cuda"]), unavailable_reason=no_gpu, skip_unavailable=skip_unavailable)
    assert caught.value.hint == "targets: [cpu]   # in the spec of m; every machine has it"


def test_one_target_alone_leaves_the_others_out_by_name() -> None:
    plan = build_plan(spec("auto"), unavailable_reason=everything, only="cpu")
    assert (plan.targets, dict(plan.missing)) == (("cpu",), {"cuda": "left out by --target"})


def test_a_target_the_spec_does_not_have_is_an_error() -> None:
    with pytest.raises(SpecError, match="no such target in m: cuda"):
        build_plan(spec(["cpu"]), unavailable_reason=everything, only="cuda")


def test_nobody_is_told_to_add_a_target_that_there_is_not() -> None:
    with pytest.raises(SpecError, match="no such target in m: gpu") as caught:
        build_plan(spec(["cpu"]), unavailable_reason=everything, only="gpu")
    assert caught.value.hint == "ortprep prepare m"


def test_a_target_asked_for_by_name_is_not_skipped_in_silence() -> None:
    with pytest.raises(SpecError, match="no NVIDIA driver"):
        build_plan(spec("auto"), unavailable_reason=no_gpu, only="cuda")


def test_every_bundle_has_a_portable_variant() -> None:
    assert build_plan(spec("auto"), unavailable_reason=no_gpu).variants == ("cpu", "portable")


def test_problems_of_all_models_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        build_plans([spec(["cuda"], "a"), spec(["cpu"], "b"), spec(["cuda"], "c")], unavailable_reason=no_gpu)
    assert "cuda of a" in caught.value.message
    assert "cuda of c" in caught.value.message


def test_skipping_leaves_out_what_cannot_be_built_at_all_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    specs = [spec(["cuda"], "a"), spec(["cpu"], "b")]
    plans = build_plans(specs, unavailable_reason=no_gpu, skip_unavailable=True)
    assert [plan.spec.name for plan in plans] == ["b"]
    assert "left out: target not available on this machine: cuda of a" in caplog.text


def test_skipping_everything_of_every_model_is_an_error() -> None:
    with pytest.raises(SpecError, match="cuda of a"):
        build_plans([spec(["cuda"], "a")], unavailable_reason=no_gpu, skip_unavailable=True)
