"""What a predictor is asked for is what its model has, or is refused before a row is run."""

from __future__ import annotations

import numpy as np
import pytest

from ortprep.cluster.data.arguments import check_keep, check_sizes, choose_columns
from ortprep.errors import PoolError


def test_lengths_of_batches_are_whole_numbers_that_the_model_takes() -> None:
    assert check_sizes("batch_sizes", [8, np.int64(2), 8], fixed=None, model="net") == (2, 8)
    assert check_sizes("batch_sizes", [4], fixed=4, model="net") == (4,)
    wrong: list[tuple[object, int | None]] = [
        ([0], None), ([-1], None), ([2.5], None), ([True], None), (["2"], None), ("28", None), (8, None),
        ([2, 4], 4), ([], 4), (None, None),
    ]  # fmt: skip
    for asked, fixed in wrong:
        with pytest.raises(PoolError, match="bad batch_sizes of net"):
            check_sizes("batch_sizes", asked, fixed=fixed, model="net")


def test_every_output_that_is_wanted_has_a_column_of_its_own() -> None:
    names = ["y", "z"]
    assert choose_columns(None, names, model="net") == {"y": "y", "z": "z"}
    assert choose_columns(["z"], names, model="net") == {"z": "z"}
    assert choose_columns({"y": "z", "z": "y"}, names, model="net") == {"y": "z", "z": "y"}
    for wrong, said in [
        ({"y": "a", "z": "a"}, "a column for each"),
        ("yz", "names, got the text 'yz'"),
        (["q"], "no output 'q'"),
        ([], "no output 'of no name'"),
    ]:
        with pytest.raises(PoolError, match=rf"bad outputs[\s\S]*{said}"):
            choose_columns(wrong, names, model="net")


def test_columns_are_kept_unless_outputs_are_called_so() -> None:
    assert check_keep(keep=True, answers=["y"]) is True
    assert check_keep(["id"], ["y"]) == ("id",)
    for wrong, said in [("id", "the text 'id'"), (["id", "y"], "'y', which an output is called")]:
        with pytest.raises(PoolError, match=said):
            check_keep(wrong, ["y"])
