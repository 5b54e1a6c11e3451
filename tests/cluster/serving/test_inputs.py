"""Inputs reach the actor as they were handed over, be they copied or in the object store."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.cluster.serving.inputs import Inputs
from pipeline.cluster.serving.packing import SMALL_BYTES
from pipeline.runtime.pool.requests import Signature
from tests.cluster.serving.test_exchange import Memory

FLOAT = np.dtype(np.float32)
NET = Signature("net", {"x": FLOAT, "s": FLOAT}, {"y": FLOAT})


@pytest.mark.parametrize("size", [4, SMALL_BYTES], ids=["small", "large"])
def test_inputs_keep_shape_value_and_type_whatever_the_request_weighs(size: int) -> None:
    memory = Memory()
    x, s = np.arange(2 * size, dtype=">f4").reshape(2, size).T, np.array(3, np.float32)
    kept = Inputs(memory).keep(NET, [x, s], x.nbytes + s.nbytes)
    assert [array.shape for array in kept] == [(size, 2), ()]
    assert [array.dtype for array in kept] == [FLOAT, FLOAT]
    assert all(array.flags.c_contiguous for array in kept)
    assert (kept[0] == x).all()
    assert kept[1] == 3
    assert memory.put_bytes == (x.nbytes + s.nbytes if x.nbytes > SMALL_BYTES else 0)
    x[...], s[...] = 0, 0
    assert kept[0][1, 0] == 1
    assert kept[1] == 3


def test_what_is_shared_lies_in_the_object_store_once() -> None:
    memory = Memory()
    inputs = Inputs(memory)
    view = inputs.share(np.ones((1, SMALL_BYTES), np.float32))
    put_bytes = memory.put_bytes
    for _ in range(3):
        kept = inputs.keep(NET, [view, np.zeros((), np.float32)], view.nbytes)
        assert (kept[0] == 1).all()
    assert memory.put_bytes == put_bytes + 3 * 4
