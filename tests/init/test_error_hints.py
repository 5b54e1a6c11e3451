"""What ONNX Runtime says when a size does not fit leads to one that does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.init.shapes import MAX_SIZE, find_index_limit, find_input, find_node, suggest_sizes

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
        (CONCAT, 100, 128),
        (GEMM, 224, 30),
        (BROADCAST.format("401 by 197"), 320, 224),  # patches of 16 pixels, and one position for the class
        (BROADCAST.format("128 by 50"), 128, 50),
        (GATHER, 128, 77),
        (RESHAPE % 25088, 640, 224),
        (
            "MatMul node. Name:'m' Status Message: Failed to allocate memory for requested buffer of size 9",
            640,
            320,
        ),
    ],
)
def test_a_message_leads_to_the_size_that_runs(message, size, expected):
    assert expected in suggest_sizes(message, size)[:8]


def test_what_a_message_names_is_found():
    assert (find_node(CONCAT), find_node(BROADCAST), find_node("failed")) == ("join", None, None)
    assert (find_index_limit(GATHER), find_index_limit(CONCAT)) == (77, None)
    said = "Invalid rank for input: x Got: 2 Expected: 3"
    assert (find_input(said, ("x",)), find_input(said, ("y",))) == ("x", None)


@given(
    st.text(max_size=200) | st.from_regex(r"(\{-?\d{1,12}(,-?\d{1,12})*\} ?){1,3}"), st.integers(1, MAX_SIZE)
)
def test_whatever_is_said_suggests_sizes_that_can_be(message, size):
    found = suggest_sizes(message, size)
    assert len(set(found)) == len(found)
    assert all(0 < one <= MAX_SIZE and one != size for one in found)
