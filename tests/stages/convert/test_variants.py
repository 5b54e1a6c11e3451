"""Which variants a spec asks for, and which task makes the graph of each."""

from __future__ import annotations

from typing import Any

import pytest

from ortprep.build.build_plan import STAGES
from ortprep.build.execution import build_tasks
from ortprep.bundle.paths import is_safe_name
from ortprep.spec.validation import parse_spec
from ortprep.stages.convert.precision import plan_steps, why_not_needed
from ortprep.stages.core.contract import Plan, TaskId
from ortprep.stages.core.results import FETCH, source_task


def plan(*targets: str, **convert: Any) -> Plan:
    spec = {"name": "net", "source": {"path": "net.onnx"}, **({"convert": convert} if convert else {})}
    return Plan(parse_spec(spec), targets or ("cpu",), {})


def test_one_binding_binds_every_variant_but_the_portable_one():
    made = plan(shapes={"batch": 4}, precision="fp16").variant_plans
    assert [dict(variant.binding) for variant in made.values()] == [{"batch": 4}, {"batch": 4}, {}]
    assert not any(variant.is_bucket for variant in made.values())


def test_buckets_are_beside_every_precision_and_are_made_from_it():
    made = plan(shapes=[{"batch": 1}, {"batch": 8, "length": 128}], precision="int8").variant_plans
    buckets = [variant for variant in made.values() if variant.is_bucket]
    assert [variant.name for variant in buckets] == [
        "cpu-batch1",
        "cpu-batch8-length128",
        "cpu-int8-batch1",
        "cpu-int8-batch8-length128",
    ]
    assert [variant.parent for variant in buckets] == ["cpu", "cpu", "cpu-int8", "cpu-int8"]
    assert {variant.precision for variant in buckets[2:]} == {"int8"}


@pytest.mark.parametrize(
    "buckets",
    [
        [{"a/b": 1}, {"a\\b": 1}],
        [{"n" * 200: 1}, {"m" * 200: 1}],
        [{"..": 3}, {"image[0]": 3}],
        [{"größe": 2}],
    ],
)
def test_whatever_dimensions_are_called_variants_have_safe_names_that_differ(buckets):
    names = plan(shapes=buckets).variants
    assert all(map(is_safe_name, names))
    assert len(set(names)) == len(names)


def test_a_graph_comes_from_the_nearest_ancestor_that_changes_it():
    made = plan(precision="int8", shapes=[{"batch": 1}])
    assert source_task(made, "cpu") == source_task(made, "portable") == FETCH
    assert source_task(made, "cpu-int8-batch1") == TaskId("convert", "cpu-int8-batch1")
    fused = plan(precision="int8", fusion={"model_type": "bert"})
    assert source_task(fused, "cpu") == TaskId("convert", "cpu")
    assert source_task(fused, "portable") == FETCH


@pytest.mark.parametrize(
    "convert",
    [
        {},
        {"precision": ["mixed", "int8"], "shapes": [{"batch": 1}, {"batch": 2}]},
        {"fusion": {"model_type": "gpt2"}, "precision": {"cuda": "fp16"}, "shapes": {"batch": 1}},
    ],
)
@pytest.mark.parametrize("targets", [("cpu",), ("cuda",), ("cuda", "cpu")])
def test_tasks_come_after_those_they_require_the_source_first_and_the_bundle_last(convert, targets, tmp_path):
    tasks = build_tasks(plan(*targets, **convert), STAGES, tmp_path)
    seen: set[TaskId] = set()
    for task in tasks:
        assert set(task.requires) <= seen, task.id
        seen.add(task.id)
    assert tasks[0].id == FETCH
    assert tasks[-1].id == TaskId("package")


def test_the_ladder_goes_down_from_what_is_asked_for():
    ladder = ("int8", "mixed", "fp16", "fp32")
    assert plan_steps("int8", ladder) == ladder
    assert plan_steps("fp16", ladder) == ("fp16", "fp32")
    assert plan_steps("int4", ladder) == ("int4", *ladder)
    assert plan_steps("int8", ()) == ("int8",)


def test_a_step_that_the_bundle_has_anyway_makes_no_variant():
    assert why_not_needed("fp32", ()) is not None
    assert why_not_needed("fp16", ("fp16",)) is not None
    assert why_not_needed("fp16", ("int8",)) is None
