"""What several processes recorded of one model becomes one description of its inputs."""

from __future__ import annotations

from typing import Any

import pytest

from ortprep.adopt.model_use import MAX_SHAPES, merge_uses
from ortprep.adopt.observation import FeedRecord, ModelRecord
from ortprep.adopt.spec_options import options_of
from ortprep.bundle.session_record import SessionOptionsRecord

DEFAULTS = SessionOptionsRecord("ORT_ENABLE_ALL")


def model(
    *feeds: FeedRecord,
    loads: int = 1,
    others: int = 0,
    options: SessionOptionsRecord = DEFAULTS,
    **limits: tuple[float, float],
) -> ModelRecord:
    runs = others + sum(feed.runs for feed in feeds)
    return ModelRecord("/m.onnx", None, 1, 1, options, (), (), None, {}, loads, runs, feeds, limits)


def feed(runs: int = 1, /, values: dict[str, tuple[Any, ...]] | None = None, **shapes: Any) -> FeedRecord:
    return FeedRecord(runs, shapes, values or {})


def test_runs_and_limits_of_all_processes_count_the_most_frequent_shapes_first() -> None:
    use = merge_uses(
        [
            model(feed(2, x=(1, 8)), feed(3, x=(1, 9)), loads=2, x=(-0.123456, 1.0)),
            model(feed(4, x=(1, 8)), x=(0.0, 2.000001)),
        ]
    )
    assert (use.inputs["x"].shapes, use.inputs["x"].range) == (((1, 8), (1, 9)), (-0.123456, 2.000001))
    assert (use.weights, use.loads, use.runs, use.runs_per_load) == ((6, 3), 3, 9, 3)


def test_the_largest_shapes_are_in_the_spec_however_rare() -> None:
    use = merge_uses([model(*(feed(100 - size, x=(1, size)) for size in range(1, 60)))])
    assert len(use.inputs["x"].shapes) == MAX_SHAPES
    assert use.inputs["x"].shapes == ((1, 1), (1, 2), (1, 3), (1, 59))
    assert use.shapes == 59


@pytest.mark.parametrize(
    ("second", "shapes", "values"),
    [
        ((8000,), ((1, 512),), (16_000,)),  # that rate goes with that shape
        ((8000, 16_000), ((1, 512), (1, 256)), (16_000,)),
        ((), ((1, 512), (1, 256)), (16_000,)),  # more than were kept
    ],
)
def test_values_are_those_that_suit_every_shape(second: Any, shapes: Any, values: Any) -> None:
    feeds = feed(9, {"sr": (16_000,)}, x=(1, 512), sr=(1,)), feed(2, {"sr": second}, x=(1, 256), sr=(1,))
    use = merge_uses([model(*feeds, sr=(8000, 16_000))])
    assert (use.inputs["x"].shapes, use.inputs["sr"].values, use.inputs["sr"].range) == (shapes, values, None)
    assert use.excluded_shapes == 2 - len(shapes)
    said = ("sets of shapes with other values of small inputs: 1",) if use.excluded_shapes else ()
    assert options_of(use, version="1.22.0").left_out == said


@pytest.mark.parametrize(
    ("longer", "said"),
    [
        ((30, 31, 32), {"values": (1, 2, 30, 31, 32)}),
        (None, {"values": None, "range": (1, 32)}),
        ((1, 32), {"values": (1, 2, 32)}),
    ],
)
def test_ids_of_a_table_may_differ_by_shape(longer: Any, said: dict[str, Any]) -> None:
    second = feed(20, {} if longer is None else {"x": longer}, x=(1, 3))
    use = merge_uses([model(feed(40, {"x": (1, 2)}, x=(1, 2)), second, x=(1, 32))], ids=["x"])
    assert (use.inputs["x"].shapes, use.excluded_shapes) == (((1, 2), (1, 3)), 0)
    assert {name: getattr(use.inputs["x"], name) for name in said} == said


def test_values_of_a_small_array_are_not_those_of_a_large_one() -> None:
    use = merge_uses([model(feed(9, {"x": (5, 7)}, x=(1, 2)), feed(2, x=(1, 128)), x=(5, 900))])
    assert (use.inputs["x"].values, use.inputs["x"].range) == (None, (5, 900))


def test_fractions_that_differ_become_limits() -> None:
    feeds = [feed(1, {"scale": (0.25 * size,)}, x=(1, size), scale=(1,)) for size in (2, 3)]
    use = merge_uses([model(*feeds, scale=(0.5, 0.75))])
    assert len(use.inputs["x"].shapes) == 2
    assert use.inputs["scale"].range == (0.5, 0.75)


def test_runs_with_other_shapes_are_counted() -> None:
    use = merge_uses([model(feed(2, x=(1, 8))), model(feed(2, x=(1, 8)), others=3)])
    assert (use.shapes, use.other_runs, use.shape_count) == (1, 3, "1 or more")


def test_the_options_of_most_runs_count() -> None:
    rare = SessionOptionsRecord("ORT_ENABLE_ALL", {"intra_op_num_threads": 1})
    use = merge_uses([model(feed(1, x=(1,)), options=rare), model(feed(5, x=(1,)))])
    assert (use.model.options, use.other_options) == (DEFAULTS, 1)


def test_a_model_that_never_ran_says_nothing_of_its_inputs() -> None:
    use = merge_uses([model(loads=3)])
    assert (use.inputs, use.weights, use.runs_per_load) == ({}, (), 1)
