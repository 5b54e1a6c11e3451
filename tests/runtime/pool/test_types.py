"""Element types, shapes, orders and strides: handled, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from ortprep.errors import InvalidRequestError, PoolError
from ortprep.runtime import PoolConfig, SessionPool
from ortprep.runtime.tensors.element_types import ELEMENT_TYPES, narrow
from tests.runtime.pool.builders import CODES, write_doubling, write_passing_on

pytestmark = pytest.mark.runtime
NATIVE = sorted(CODES.keys() - {"string", "bfloat16"})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NATIVE)
def test_every_type_of_numpy_comes_back_as_it_was_sent(tmp_path, dtype):
    generator = np.random.default_rng(0)
    sample = generator.integers(0, 2 if dtype == "bool" else 100, (3, 5)).astype(dtype)
    with SessionPool(write_passing_on(tmp_path / "same", dtype, sample), PoolConfig(devices="cpu")) as pool:
        for shape in ((3, 5), (1, 0), (0, 7), (200, 300), (200, 300)):
            x = generator.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
            y = pool.run({"x": x})["y"]
            assert (y.dtype, y.shape) == (x.dtype, x.shape)
            np.testing.assert_array_equal(y, x)


def test_a_type_that_numpy_lacks_comes_back_as_it_was_sent(tmp_path):
    kind = ELEMENT_TYPES["bfloat16"]
    sample = narrow(np.linspace(-2, 2, 15).reshape(3, 5), kind)
    with SessionPool(
        write_passing_on(tmp_path / "same", "bfloat16", sample), PoolConfig(devices="cpu")
    ) as pool:
        for x in (sample, narrow(np.random.default_rng(0).standard_normal((300, 200)), kind)):
            for _ in range(2):
                y = pool.run({"x": x})["y"]
                assert y.dtype == kind.dtype
                np.testing.assert_array_equal(y["bfloat16"], x["bfloat16"])
        with pytest.raises(InvalidRequestError, match="expected bfloat16, got uint16"):
            pool.run({"x": sample["bfloat16"]})


def test_strings_are_refused_by_name(tmp_path):
    path = write_passing_on(tmp_path / "text", "string", np.array([["a"]]))
    with pytest.raises(PoolError, match=r"text cannot be served(?s:.)*got x: string, y: string"):
        SessionPool(path, PoolConfig(devices="cpu"))


def test_scalars_have_no_axis(tmp_path):
    with SessionPool(write_doubling(tmp_path / "scalar", shape=()), PoolConfig(devices="cpu")) as pool:
        y = pool.run({"x": np.float32(4)})["y"]
        assert (y.shape, float(y)) == ((), 8.0)


def test_any_order_stride_and_endianness_means_the_same(bundle):
    x = np.arange(200 * 300, dtype=np.float32).reshape(200, 300)
    with SessionPool(bundle, PoolConfig(devices="cpu")) as pool:
        for array in (
            np.asfortranarray(x),
            x.astype(">f4"),
            x[::2, ::-3],
            x[5:6],
            np.broadcast_to(x[:1], (50, 300)),
        ):
            y = pool.run({"x": array})["y"]
            assert y.dtype == np.float32
            np.testing.assert_array_equal(y, 2 * np.asarray(array, np.float32))


def test_read_only_and_subclassed_arrays_are_taken(bundle):
    x = np.ones((2, 3), np.float32)
    x.flags.writeable = False
    with SessionPool(bundle, PoolConfig(devices="cpu")) as pool:
        assert (pool.run({"x": x})["y"] == 2).all()
        assert (pool.run({"x": np.ma.masked_array(np.ones((2, 3), np.float32))})["y"] == 2).all()
