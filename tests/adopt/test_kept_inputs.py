"""Laws of the real inputs that are kept while an application runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ortprep.adopt import observation
from ortprep.adopt.observation import InputKeeper, choose_spread
from ortprep.runtime.tensors.arrays import read_tensors


def feed(rows: int, fill: float = 0.0) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 4), fill, np.float32)}


def shapes_of(folder: Path, keeper: InputKeeper) -> list[int]:
    return [read_tensors(folder / name)["x"].shape[0] for name in keeper.files]


def test_every_input_is_kept_while_there_is_room(tmp_path):
    keeper = InputKeeper(tmp_path, "net", 4)
    for number in range(3):
        keeper.add(feed(1, number))
    assert sorted(read_tensors(tmp_path / name)["x"][0, 0] for name in keeper.files) == [0.0, 1.0, 2.0]


def test_inputs_are_spread_over_the_shapes_whatever_their_order(tmp_path):
    keeper = InputKeeper(tmp_path, "net", 9)
    for rows in [*[1] * 100, *[2] * 10, *[3] * 10]:
        keeper.add(feed(rows))
    assert Counter(shapes_of(tmp_path, keeper)) == {1: 3, 2: 3, 3: 3}
    assert shapes_of(tmp_path, keeper) == sorted(shapes_of(tmp_path, keeper))


def test_of_one_shape_later_inputs_are_kept_too(tmp_path):
    keeper = InputKeeper(tmp_path, "net", 8)
    for number in range(200):
        keeper.add(feed(1, number))
    kept = [read_tensors(tmp_path / name)["x"][0, 0] for name in keeper.files]
    assert len(set(kept)) == 8
    assert max(kept) >= 100


def test_more_shapes_than_room_keep_to_the_limit(tmp_path):
    keeper = InputKeeper(tmp_path, "net", 4)
    for rows in range(1, 50):
        keeper.add(feed(rows))
    assert len(keeper.files) == len(list(tmp_path.iterdir())) == 4


def test_the_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(observation, "MAX_KEPT_BYTES", 100)
    keeper = InputKeeper(tmp_path, "net", 64)
    for _ in range(10):
        keeper.add(feed(2))  # 32 bytes
    assert len(keeper.files) == 3


def test_the_size_is_bounded_when_larger_inputs_replace_smaller_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(observation, "MAX_KEPT_BYTES", 200)
    keeper = InputKeeper(tmp_path, "net", 4)
    for rows in [1, 1, 1, 1, 8, 9, 10]:  # 16 bytes a row
        keeper.add(feed(rows))
    assert shapes_of(tmp_path, keeper) == [1, 1, 1, 8]


def test_the_number_of_shapes_that_are_counted_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(observation, "MAX_COUNTED_SHAPES", 3)
    keeper = InputKeeper(tmp_path, "net", 64)
    for rows in [1, 2, 3, 4, 1]:
        keeper.add(feed(rows))
    assert sorted(shapes_of(tmp_path, keeper)) == [1, 1, 2, 3]


@pytest.mark.parametrize("value", [np.array(["a name"]), np.array([object()]), (1, 4)])
def test_what_is_no_array_of_numbers_is_never_kept(tmp_path, value):
    keeper = InputKeeper(tmp_path, "net", 4)
    keeper.add({"x": np.zeros((1, 4), np.float32), "name": value})
    assert keeper.files == ()
    assert not list(tmp_path.iterdir())


def test_files_are_chosen_from_all_over_their_order():
    files = [Path(str(number)) for number in range(10)]
    assert [file.name for file in choose_spread(files, 5)] == ["0", "2", "4", "6", "8"]
    assert choose_spread(files[:2], 5) == tuple(files[:2])
    assert choose_spread([], 5) == ()
