"""Rows become batches of the lengths that a model takes, and answers become rows again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.loader_config import TensorSpec
from ortprep.cluster.data import (
    Piece,
    cut,
    find_fixed_size,
    join,
    plan_pieces,
)
from ortprep.errors import PoolError

sizes = st.lists(st.integers(1, 64), max_size=4)


@given(st.integers(0, 300), sizes)
def test_every_row_is_in_one_piece_and_in_order(count: int, lengths: list[int]) -> None:
    pieces = plan_pieces(count, lengths)
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(count))
    assert all(piece.stop - piece.start <= piece.size for piece in pieces)


@given(st.integers(1, 300), sizes.filter(bool))
def test_a_padded_batch_has_one_of_the_lengths_and_only_the_last_is_padded(
    count: int, lengths: list[int]
) -> None:
    pieces = plan_pieces(count, lengths)
    assert {piece.size for piece in pieces} <= set(lengths)
    assert all(piece.stop - piece.start == piece.size for piece in pieces[:-1])


def test_padding_is_less_than_half_where_a_smaller_length_is_there() -> None:
    assert plan_pieces(9, (1, 8, 32)) == (Piece(0, 8, 8), Piece(8, 9, 1))
    assert plan_pieces(20, (1, 8, 32)) == (Piece(0, 20, 32),)
    assert plan_pieces(3, (8,)) == (Piece(0, 3, 8),)
    assert plan_pieces(11, ()) == (Piece(0, 11, 11),)


@given(st.integers(1, 40), sizes)
def test_what_is_cut_and_joined_is_what_it_was(count: int, lengths: list[int]) -> None:
    rows = np.arange(count * 2).reshape(count, 2)
    pieces = plan_pieces(count, lengths)
    parts = [(piece, cut(rows, piece)) for piece in pieces]
    assert all(len(part) == piece.size for piece, part in parts)
    assert (join(parts, output="y", model="net") == rows).all()


def test_padding_repeats_the_last_row() -> None:
    assert cut(np.array([1, 2, 3]), Piece(1, 3, 5)).tolist() == [2, 3, 3, 3, 3]


def test_an_answer_without_a_row_for_every_row_is_refused() -> None:
    for wrong in (np.float32(1), np.ones((2, 4))):
        with pytest.raises(PoolError, match="output 'y' of net does not have one row per input row"):
            join([(Piece(0, 3, 3), np.asarray(wrong))], output="y", model="net")


def test_the_length_that_a_model_fixes_is_found() -> None:
    free, fixed = TensorSpec("a", "float32", ("n", 3)), TensorSpec("b", "float32", (4, 3))
    assert find_fixed_size([free]) is None
    assert find_fixed_size([free, fixed]) == 4
    with pytest.raises(PoolError, match="different fixed batch sizes"):
        find_fixed_size([fixed, TensorSpec("c", "float32", (5,))])
    with pytest.raises(PoolError, match="'k' has no axis for rows"):
        find_fixed_size([fixed, TensorSpec("k", "int64", ())])
    assert find_fixed_size([fixed, TensorSpec("k", "int64", ())], constant=["k"]) == 4
