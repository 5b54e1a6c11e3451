"""Binding symbolic dimensions: every size is in the written model, its answers stay, nothing else moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from ortprep.build.build_plan import STAGES
from ortprep.build.execution import build_tasks
from ortprep.bundle.onnx_inputs import read_inputs
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import StageError
from ortprep.spec.validation import parse_spec
from ortprep.stages.convert.pass_records import PassRequest
from ortprep.stages.convert.precision import plan_steps, why_not_needed
from ortprep.stages.convert.shapes import bind_shapes
from ortprep.stages.core.contract import Plan, TaskId
from ortprep.stages.core.results import FETCH, source_task
from tests import builders as models


def bind(source: Path, sizes: dict[str, int]) -> tuple[dict[str, Any], Path]:
    """Returns the shapes of the bound model's inputs, and the model."""
    written = source.parent / "bound" / "model.onnx"
    written.parent.mkdir()
    bind_shapes(PassRequest(name="shapes", source=source, written=written, dimensions=sizes))
    return {spec.name: spec.shape for spec in read_inputs(written)}, written


def answer(path: Path, feeds: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def shape(value: onnx.ValueInfoProto) -> list[int | str | None]:
    dims = value.type.tensor_type.shape.dim
    return [dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else None) for dim in dims]


def test_a_bound_name_has_its_size_in_every_input_and_output(tmp_path):
    source = models.write_model(models.two_inputs(), tmp_path / "model.onnx")
    inputs, written = bind(source, {"batch": 3})
    graph = onnx.load(written).graph
    assert inputs == {"left": (3, 4), "right": (3, 4)}
    assert [shape(output) for output in graph.output] == [[3, 5]]


def test_an_axis_without_a_name_is_called_by_input_and_number(tmp_path):
    source = models.write_model(models.conv_net(batch=None), tmp_path / "model.onnx")
    inputs, written = bind(source, {"image[0]": 4})
    assert inputs == {"image": (4, 3, 16, 16)}
    assert shape(onnx.load(written).graph.output[0]) == [4, 10]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"bach": 3}, "expected one of batch"),
        ({"left[1]": 4}, "expected one of batch"),
        ({"left[9]": 4}, "expected one of batch"),
        ({"batch": 2, "right[0]": 3}, "expected 2, as for batch, got 3"),
    ],
)
def test_what_cannot_be_bound_is_refused_and_nothing_is_written(tmp_path, sizes, said):
    source = models.write_model(models.two_inputs(), tmp_path / "model.onnx")
    with pytest.raises(StageError, match=said) as error:
        bind(source, sizes)
    assert error.value.hint is not None
    assert "shapes: {batch: " in error.value.hint
    assert list((tmp_path / "bound").iterdir()) == []


def test_notes_of_sequences_stay_what_they_are(tmp_path):
    model = models.conv_net()
    note = onnx.helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    model.graph.value_info.append(note)
    _, written = bind(models.write_model(model, tmp_path / "model.onnx"), {"batch": 2})
    assert list(onnx.load(written).graph.value_info) == [note]


def test_external_weights_are_linked_and_not_read(tmp_path):
    source = models.write_external_model(models.matmul_net(), tmp_path / "model.onnx", location="data/w.bin")
    _, written = bind(source, {"batch": 2})
    assert (written.parent / "data/w.bin").samefile(tmp_path / "data/w.bin")
    assert written.stat().st_size < 2048
    feeds = {"x": np.ones((2, 64), np.float32)}
    np.testing.assert_array_equal(answer(written, feeds), answer(source, feeds))


def test_external_weights_of_branches_are_copied_since_links_to_them_are_refused(tmp_path):
    source = models.write_external_model(models.if_net(size=4096), tmp_path / "model.onnx")
    _, written = bind(source, {"batch": 1})
    assert not (written.parent / "weights.bin").samefile(tmp_path / "weights.bin")
    feeds = {"x": np.ones((1, 4096), np.float32)}
    np.testing.assert_array_equal(answer(written, feeds), answer(source, feeds))


# -- which variants a spec asks for, and which task makes the graph of each


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
