"""Which targets are built: named ones or an error, automatic ones as the machine has them."""

from __future__ import annotations

from typing import Any

import pytest

from ortprep.build import build_plan as planning
from ortprep.build.build_plan import build_plan, plan_specs
from ortprep.errors import SpecError
from ortprep.spec.models import ModelSpec


def spec(targets: Any, name: str = "m") -> ModelSpec:
    return ModelSpec.model_validate({"name": name, "source": {"path": "m.onnx"}, "targets": targets})


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(planning, "unavailable_reason", {"cuda": "no NVIDIA driver"}.get)


@pytest.fixture
def gpu(no_gpu, monkeypatch):
    monkeypatch.setattr(planning, "unavailable_reason", lambda _: None)


def test_auto_takes_what_is_there_and_calls_nothing_missing():
    plan = build_plan(spec("auto"))
    assert (plan.targets, plan.missing, plan.variants) == (("cpu",), {}, ("cpu", "portable"))


@pytest.mark.usefixtures("gpu")
def test_the_fastest_comes_first_and_one_target_alone_leaves_the_others_out_by_name():
    assert build_plan(spec("auto")).targets == ("cuda", "cpu")
    plan = build_plan(spec("auto"), only="cpu")
    assert (plan.targets, dict(plan.missing)) == (("cpu",), {"cuda": "left out by --target"})


def test_skipping_builds_the_rest_and_says_what_is_missing():
    plan = build_plan(spec(["cpu", "cuda"]), skip_unavailable=True)
    assert (plan.targets, dict(plan.missing)) == (("cpu",), {"cuda": "no NVIDIA driver"})


NOWHERE = "targets: [cpu]   # in the spec of m; every machine has it"


@pytest.mark.parametrize(
    ("targets", "options", "told", "hint"),
    [
        (["cpu", "cuda"], {}, "cuda: no NVIDIA driver", "ortprep prepare m --skip-unavailable"),
        (["cuda"], {}, "not available", NOWHERE),
        (["cuda"], {"skip_unavailable": True}, "not available", NOWHERE),
        ("auto", {"only": "cuda"}, "no NVIDIA driver", "ortprep prepare m --skip-unavailable"),
        (["cpu"], {"only": "cuda"}, "no such target in m: cuda", "add it to targets: of the spec, or run: "),
        (["cpu"], {"only": "gpu"}, "no such target in m: gpu", "ortprep prepare m"),
    ],
)
def test_a_named_target_that_is_not_there_is_an_error_with_the_way_out(targets, options, told, hint):
    with pytest.raises(SpecError, match=told) as caught:
        build_plan(spec(targets), **options)
    assert (caught.value.hint or "").startswith(hint)


def test_problems_of_all_models_are_reported_at_once(tmp_path):
    specs = [spec(["cuda"], "a"), spec(["cpu"], "b"), spec(["cuda"], "c")]
    with pytest.raises(SpecError, match=r"cuda of a(.|\n)*cuda of c"):
        plan_specs(specs, tmp_path)
    with pytest.raises(SpecError, match="cuda of a"):
        plan_specs(specs[:1], tmp_path, skip_unavailable=True)


def test_skipping_leaves_out_what_cannot_be_built_at_all_and_says_so(tmp_path, caplog):
    builds = plan_specs([spec(["cuda"], "a"), spec(["cpu"], "b")], tmp_path, skip_unavailable=True)
    assert [tasks[0].model for tasks in builds] == ["b"]
    assert "left out: target not available on this machine: cuda of a" in caplog.text
