"""What ONNX Runtime says when a size does not fit leads to one that does."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.model_facts import ModelFacts, ModelInterface
from ortprep.init.graph_facts import GraphFacts
from ortprep.init.input_search import MAX_ATTEMPTS, InputSearch
from ortprep.init.shapes import MAX_SIZE, find_index_limit, find_node, suggest_sizes

CONCAT = (
    "Non-zero status code returned while running Concat node. Name:'join' Status Message: concat.cc:183 "
    "Non concat axis dimensions must match: Axis 2 has mismatched dimensions of 100 and 96"
)
GEMM = "running Gemm node. Name:'head' Status Message: GEMM: Dimension mismatch, W: {900,5} K: 50176 N:5"
BROADCAST = "Name:'' Status Message: Attempting to broadcast an axis by a dimension other than 1. {}"
GATHER = "indices element out of data bounds, idx=77 must be within the inclusive range [-77,76]"
RESHAPE = "cannot be reshaped to the requested shape. Input shape:{1,512,20,20}, requested shape:{1,%d}"


@pytest.mark.parametrize(
    ("message", "size", "expected"),
    [
        (CONCAT, 640, (224, 256, 183, 2, 100, 96)),  # usual sizes before the message's own
        (GATHER, 128, (77, 76, 75, 38, 224, 256, 640)),
        (
            "MatMul node. Name:'m' Status Message: Failed to allocate memory for a buffer of 9",
            640,
            (320, 160),
        ),
    ],
)
def test_a_message_leads_to_other_sizes(message, size, expected):
    assert suggest_sizes(message, size, (224, 256, 640)) == expected


def test_what_a_message_names_is_found():
    assert (find_node(CONCAT), find_node(BROADCAST), find_node("failed")) == ("join", None, None)
    assert (find_index_limit(GATHER), find_index_limit(CONCAT)) == (77, None)


@given(
    st.text(max_size=200) | st.from_regex(r"(\{-?\d{1,12}(,-?\d{1,12})*\} ?){1,3}"), st.integers(1, MAX_SIZE)
)
def test_whatever_is_said_suggests_sizes_that_can_be(message, size):
    found = suggest_sizes(message, size, ())
    assert len(set(found)) == len(found)
    assert all(0 < one <= MAX_SIZE and one != size for one in found)


# -- whatever a model declares, and whatever ONNX Runtime says, there is something to feed

NAMES = (
    "x",
    "image",
    "past.0.key",
    "mask",
    "pad_mask",
    "lens",
    "sr",
    "orig_size",
    "input_ids",
    "position_ids",
)
DTYPES = ("float32", "float16", "int64", "int16", "uint8", "bool", "string", "complex64", "bfloat16")
FORMULAS = ("2*past", "past + seq", "total_len + 1", "1" * 5000, "a b", "3*")
AXES = ("batch", "past", "seq", "total_len", "h", "w", *FORMULAS)
SAID = ["", "no", CONCAT, GEMM, GATHER, BROADCAST.format("17 by 128"), RESHAPE % 1024]

axes = st.sampled_from([None, 0, 1, 3, 80, 640, *AXES])
shape = st.none() | st.lists(axes, max_size=5).map(tuple)
inputs = st.lists(
    st.builds(TensorSpec, st.sampled_from(NAMES), st.sampled_from(DTYPES), shape),
    max_size=3,
    unique_by=lambda one: one.name,
)


@given(inputs, st.lists(st.sampled_from(SAID), min_size=1), st.sampled_from([{}, {"input_ids": 9, "x": 1}]))
@example([TensorSpec("x", "int64", ("2*past", "total_len", "past", "seq"))], [""], {})
@settings(max_examples=60, deadline=None)
def test_the_search_ends_and_keeps_what_the_model_declares(items, said, bounds):
    runs = []

    def run(feeds):
        runs.append(feeds)
        return said[len(runs) % len(said)]

    interface = ModelInterface(tuple(items), (), bounds, external=False)
    facts = GraphFacts(ModelFacts(interface, {}, 8, {}, 0, {}), {"image": 255.0}, ("join", "head"))
    best = InputSearch(facts, {}, run).find()
    assert best.feeds in runs
    assert len(runs) <= MAX_ATTEMPTS
    assert all(one not in runs[:number] for number, one in enumerate(runs))
    for feeds in runs:
        for item in items:
            fed = feeds[item.name]
            declared = (None, None) if item.shape is None else item.shape
            assert len(fed.shape) == len(declared)
            for size, axis in zip(fed.shape, declared, strict=True):
                assert size == axis or not isinstance(axis, int)
            assert fed.values.range is None or fed.values.values is None
