"""What several processes recorded of one model becomes one description of its inputs."""

from __future__ import annotations

from typing import Any

import pytest

from ortprep.adopt.model_use import MAX_SHAPES, merge_uses
from ortprep.adopt.spec_options import options_of
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.runtime.dropin.observation import FeedRecord, InputRecord, ModelRecord

DEFAULTS = SessionOptionsRecord("ORT_ENABLE_ALL")


def model(*feeds: FeedRecord, loads: int = 1, options: SessionOptionsRecord = DEFAULTS) -> ModelRecord:
    runs = sum(feed.runs for feed in feeds)
    return ModelRecord("/m.onnx", None, 1, 1, options, (), (), None, {}, loads, runs, feeds)


def feed(runs: int = 1, /, **inputs: InputRecord) -> FeedRecord:
    return FeedRecord(runs, inputs)


def floats(*shape: int, low: float = 0.0, high: float = 1.0) -> InputRecord:
    return InputRecord(shape, low, high)


def scalar(*values: int) -> InputRecord:
    return InputRecord((1,), min(values), max(values), values)


def test_shapes_of_all_processes_come_with_their_runs_the_most_frequent_first() -> None:
    use = merge_uses(
        [model(feed(2, x=floats(1, 8)), feed(3, x=floats(1, 9)), loads=2), model(feed(4, x=floats(1, 8)))]
    )
    assert use.inputs["x"].shapes == ((1, 8), (1, 9))
    assert (use.weights, use.loads, use.runs, use.runs_per_load) == ((6, 3), 3, 9, 3)


def test_limits_are_those_of_all_runs() -> None:
    use = merge_uses([model(feed(x=floats(2, 8, low=-0.123456)), feed(x=floats(3, 8, high=2.000001)))])
    assert use.inputs["x"].range == (-0.123456, 2.000001)
    ids = merge_uses([model(feed(x=InputRecord((1, 8), 0, 29_999)), feed(x=InputRecord((1, 9), 7, 30_521)))])
    assert ids.inputs["x"].range == (0, 30_521)


def test_the_largest_shapes_are_in_the_spec_however_rare() -> None:
    many = [feed(100 - size, x=floats(1, size)) for size in range(1, 60)]
    use = merge_uses([model(*many)])
    assert len(use.inputs["x"].shapes) == MAX_SHAPES
    assert use.inputs["x"].shapes == ((1, 1), (1, 2), (1, 3), (1, 59))
    assert use.shapes == 59


@pytest.mark.parametrize(
    ("second", "shapes", "said"),
    [
        (scalar(8000), ((1, 512),), {"values": (16_000,), "range": None}),  # that rate goes with that shape
        (scalar(8000, 16_000), ((1, 512), (1, 256)), {"values": (16_000,), "range": None}),
        (InputRecord((1,), 90, 20_000), ((1, 512), (1, 256)), {"values": None, "range": (16_000, 16_000)}),
    ],
)
def test_values_are_those_that_suit_every_shape(
    second: InputRecord, shapes: tuple[Any, ...], said: dict[str, Any]
) -> None:
    use = merge_uses(
        [model(feed(9, x=floats(1, 512), sr=scalar(16_000)), feed(2, x=floats(1, 256), sr=second))]
    )
    assert use.inputs["x"].shapes == shapes
    assert {name: getattr(use.inputs["sr"], name) for name in said} == said


@pytest.mark.parametrize(
    ("longer", "said"),
    [
        ((30, 31, 32), {"values": (1, 2, 30, 31, 32)}),
        ((), {"range": (1, 32)}),
        ((1, 32), {"values": (1, 2, 32)}),
    ],
)
def test_ids_of_a_table_may_differ_by_shape(longer: tuple[int, ...], said: dict[str, Any]) -> None:
    ids = [InputRecord((1, 2), 1, 2, (1, 2)), InputRecord((1, 3), 1, 32, longer)]
    records = [model(feed(40, x=ids[0]), feed(20, x=ids[1]))]
    use = merge_uses(records, ids=["x"])
    assert (use.inputs["x"].shapes, use.excluded_shapes) == (((1, 2), (1, 3)), 0)
    assert {name: getattr(use.inputs["x"], name) for name in said} == said


def test_shapes_with_other_values_are_counted() -> None:
    use = merge_uses([model(feed(9, x=floats(1, 5), n=scalar(5)), feed(2, x=floats(1, 6), n=scalar(6)))])
    assert (use.inputs["x"].shapes, use.excluded_shapes) == (((1, 5),), 1)
    assert options_of(use, version="1.22.0").left_out == (
        "sets of shapes with other values of small inputs: 1",
    )


def test_fractions_that_differ_become_limits() -> None:
    first, second = InputRecord((1,), 0.5, 0.5, (0.5,)), InputRecord((1,), 0.75, 0.75, (0.75,))
    use = merge_uses([model(feed(x=floats(1, 2), scale=first), feed(x=floats(1, 3), scale=second))])
    assert len(use.inputs["x"].shapes) == 2
    assert use.inputs["scale"].range == (0.5, 0.75)


def test_runs_with_other_shapes_count_and_widen_the_range() -> None:
    ids = feed(2, x=InputRecord((1, 8), 3, 9))
    some = ModelRecord("/m", None, 1, 1, DEFAULTS, (), (), None, {}, 1, 5, (ids,), {"x": (1, 70)})
    use = merge_uses([model(ids), some])
    assert (use.inputs["x"].range, use.shapes, use.other_runs) == ((1, 70), 1, 3)
    assert use.shape_count == "1 or more"


def test_the_options_of_most_runs_count() -> None:
    rare = SessionOptionsRecord("ORT_ENABLE_ALL", {"intra_op_num_threads": 1})
    use = merge_uses([model(feed(1, x=floats(1)), options=rare), model(feed(5, x=floats(1)))])
    assert (use.model.options, use.other_options) == (DEFAULTS, 1)


def test_a_model_that_never_ran_says_nothing_of_its_inputs() -> None:
    use = merge_uses([model(loads=3)])
    assert (use.inputs, use.weights, use.runs_per_load) == ({}, (), 1)
