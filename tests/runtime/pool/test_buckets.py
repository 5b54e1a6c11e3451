"""A pool serves each request with the variant for its sizes, and is checked by what that one recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortprep.errors import InvalidRequestError, LoadError, PoolError
from ortprep.runtime import PoolConfig, SessionPool
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.opened_model import OpenedModel, open_model
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.runtime.tensors.element_types import BFLOAT16, to_bfloat16
from tests.runtime.builders import batch_of, weights_of, write_converted
from tests.runtime.pool.builders import write_passing_on

pytestmark = pytest.mark.runtime


@pytest.fixture
def converted(tmp_path):
    return write_converted(tmp_path / "bundle")


def test_requests_are_answered_by_the_variants_for_their_sizes(converted):
    with SessionPool(converted, PoolConfig(devices="cpu", precision="int8")) as pool:
        (worker,) = pool.stats().workers
        assert worker.variants == {"linear": "cpu-int8"}
        assert worker.buckets == {"linear": ("cpu-int8-batch4",)}
        for size, seed in [(1, 1), (4, 4), (5, 1), (4, 4), (8, 1)]:
            answer = pool.run({"x": batch_of(size)})["y"]
            np.testing.assert_allclose(answer, batch_of(size) @ weights_of(seed), rtol=1e-4, atol=1e-4)


def opened(folder: Path, *, buckets: bool = True) -> OpenedModel:
    """The model in this process, as a worker on the CPU opens it."""
    load = ModelLoadOptions(precision="fp32", digests="off", buckets=buckets, threads=1)
    return open_model(str(folder), load, name="m")


def test_a_bucket_that_answers_wrongly_neither_opens_nor_passes_a_check(converted):
    model = opened(converted)
    model.check()
    wrong = {"input:x": batch_of(8), "output:y": batch_of(8) @ weights_of(0)}
    write_tensors(converted / "cpu-batch8/golden.npz", wrong)
    with pytest.raises(LoadError, match=r"'cpu-batch8'.*does not answer as recorded"):
        model.check()
    with pytest.raises(LoadError, match=r"'cpu-batch8'.*does not answer as recorded"):
        opened(converted)


# -- element types, shapes, orders and strides: handled, or refused by name


def test_a_type_that_numpy_lacks_comes_back_as_it_was_sent(tmp_path):
    sample = to_bfloat16(np.linspace(-2, 2, 15).reshape(3, 5))
    with SessionPool(
        write_passing_on(tmp_path / "same", "bfloat16", sample), PoolConfig(devices="cpu")
    ) as pool:
        for x in (sample, to_bfloat16(np.random.default_rng(0).standard_normal((300, 200)))):
            for _ in range(2):
                y = pool.run({"x": x})["y"]
                assert y.dtype == BFLOAT16
                np.testing.assert_array_equal(y["bfloat16"], x["bfloat16"])
        with pytest.raises(InvalidRequestError, match="expected bfloat16, got uint16"):
            pool.run({"x": sample["bfloat16"]})


def test_strings_are_refused_by_name(tmp_path):
    path = write_passing_on(tmp_path / "text", "string", np.array([["a"]]))
    with pytest.raises(PoolError, match=r"text cannot be served(?s:.)*got x: string, y: string"):
        SessionPool(path, PoolConfig(devices="cpu"))
