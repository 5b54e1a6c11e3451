"""A pool serves each request with the variant for its sizes, and is checked by what that one recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ortprep.bundle.loader_config import LoaderConfig, read_loader_config
from ortprep.doctor.load_test import load_test_bundle, read_golden_cases
from ortprep.errors import LoadError, PoolError
from ortprep.runtime import PoolConfig, SessionPool
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.pool.served_model import ServedModel, open_served
from ortprep.runtime.pool.worker_process import ModelJob, WorkerJob
from ortprep.runtime.pool.worker_state import PoolStats
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import batch_of, weights_of, write_converted

pytestmark = pytest.mark.runtime


@pytest.fixture
def bundle(tmp_path):
    return write_converted(tmp_path / "bundle")


def having(config: LoaderConfig, *names: str) -> LoaderConfig:
    """What a worker has that took these variants, the one for all shapes first."""
    by_name = {variant.name: variant for variant in config.variants}
    return dataclasses.replace(config, variants=tuple(by_name[name] for name in names))


def test_requests_are_answered_by_the_variants_for_their_sizes(bundle):
    with SessionPool(bundle, PoolConfig(devices="cpu", precision="int8")) as pool:
        (worker,) = pool.stats().workers
        assert worker.variants == {"linear": "cpu-int8"}
        assert worker.buckets == {"linear": ("cpu-int8-batch4",)}
        for size, seed in [(1, 1), (4, 4), (5, 1), (4, 4), (8, 1)]:
            answer = pool.run({"x": batch_of(size)})["y"]
            np.testing.assert_allclose(answer, batch_of(size) @ weights_of(seed), rtol=1e-4, atol=1e-4)


def test_a_drive_asks_what_every_variant_recorded(bundle):
    result, stats = load_test_bundle(
        bundle,
        devices="cpu",
        workers_per_device=1,
        requests=30,
        clients=2,
        observer=lambda _: None,
        precision="int8",
    )
    assert (result.wrong, result.failed, result.problems) == (0, 0, [])
    assert sum(worker.served for worker in stats.workers) == 30


def test_the_cases_are_the_samples_of_the_variants_that_answer_them(bundle):
    config = read_loader_config(bundle)
    cases = read_golden_cases(having(config, "cpu", "cpu-batch4", "cpu-batch8"), bundle)
    assert [case.inputs["x"].shape[0] for case in cases] == [2, 4, 8]
    for case, seed in zip(cases, (0, 2, 3), strict=True):
        x = case.inputs["x"]
        assert case.find_problems({"y": x @ weights_of(seed)}) == []
        assert case.find_problems({"y": x @ weights_of(1)}) != []


def test_workers_with_different_variants_cannot_be_checked_and_that_is_said(bundle, monkeypatch):
    stats = SessionPool.stats

    def differ(pool: SessionPool) -> PoolStats:
        one, other = stats(pool).workers
        workers = (one, dataclasses.replace(other, variants={"linear": "cpu"}, buckets={}))
        return dataclasses.replace(stats(pool), workers=workers)

    monkeypatch.setattr(SessionPool, "stats", differ)
    with pytest.raises(PoolError, match="workers took different variants: cpu; cpu-int8, cpu-int8-batch4"):
        load_test_bundle(
            bundle,
            devices="cpu",
            workers_per_device=2,
            requests=1,
            clients=1,
            observer=lambda _: None,
            precision="int8",
        )


def opened(bundle: Path, *, buckets: bool = True) -> ServedModel:
    """The model in this process, as a worker on the CPU opens it."""
    config = read_loader_config(bundle)
    load = ModelLoadOptions(precision="fp32", digests="off", buckets=buckets, threads=1)
    job = WorkerJob(
        entry="",
        path=(),
        models=(),
        device_id=None,
        load=load,
    )
    return open_served(ModelJob(0, "m", str(bundle), config), job)


def test_a_worker_loads_buckets_only_where_the_pool_wants_them(bundle):
    assert opened(bundle).buckets == ("cpu-batch4", "cpu-batch8")
    assert opened(bundle, buckets=False).buckets == ()


def test_a_worker_with_a_bucket_that_answers_wrongly_does_not_become_ready(bundle):
    wrong = {"input:x": batch_of(4), "output:y": batch_of(4) @ weights_of(0)}
    write_tensors(bundle / "cpu-batch4/golden.npz", wrong)
    with pytest.raises(LoadError, match=r"'cpu-batch4'.*does not answer as recorded"):
        opened(bundle)


def test_a_check_runs_the_samples_of_buckets_too(bundle):
    model = opened(bundle)
    model.check()
    wrong = {"input:x": batch_of(8), "output:y": batch_of(8) @ weights_of(0)}
    write_tensors(bundle / "cpu-batch8/golden.npz", wrong)
    with pytest.raises(LoadError, match=r"'cpu-batch8'.*does not answer as recorded"):
        model.check()
