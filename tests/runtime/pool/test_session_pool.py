import gc
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ortprep.errors import (
    InvalidRequestError,
    LoadError,
    NoRoomError,
    PoolClosedError,
    PoolError,
    RequestTimeoutError,
    RunError,
)
from ortprep.runtime import PoolConfig, SessionPool
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.opened_model import open_model
from ortprep.runtime.pool.worker import Worker
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.runtime.tensors.element_types import BFLOAT16, to_bfloat16
from tests.fakes import wait_for
from tests.runtime.builders import batch_of, weights_of, write_converted
from tests.runtime.dropin.builders import run_python
from tests.runtime.pool import fakes as bad_workers
from tests.runtime.pool.builders import write_doubling, write_model_bundle, write_passing_on
from tests.runtime.pool.conftest import batch, start_ticks, submit

pytestmark = pytest.mark.runtime
BAD = "tests.runtime.pool.fakes:goes_wrong_when_asked"


def test_a_pool_answers_as_its_model_does(bundle):
    with SessionPool(bundle, PoolConfig(devices="cpu", workers_per_device=2)) as pool:
        for size in (0, 1, 5, 100_000):
            answer = pool.run(batch(size=size) if size else {"x": np.empty((1, 0), np.float32)})
            assert list(answer) == ["y"]
            expected = batch(size=size)["x"] * 2 if size else np.empty((1, 0))
            np.testing.assert_array_equal(answer["y"], expected)
        stats = pool.stats()
        assert [worker.state for worker in stats.workers] == ["ready", "ready"]
        assert sum(worker.served for worker in stats.workers) == 4
        assert {worker.name for worker in stats.workers} == {"cpu/0", "cpu/1"}
        for worker in stats.workers:
            assert worker.start_s is not None
            assert worker.variants == {"doubling": "cpu"}
    assert [worker.state for worker in pool.stats().workers] == ["stopped", "stopped"]


def test_workers_take_the_callers_session_options(bundle, tmp_path):
    chosen = {"enable_profiling": True, "profile_file_prefix": str(tmp_path / "trace")}
    with SessionPool(bundle, PoolConfig(devices="cpu", session_options=chosen)) as pool:
        pool.run(batch())
        assert list(tmp_path.glob("trace*.json"))
    with pytest.raises(LoadError, match="intra_op_num_threads='many'"):
        SessionPool(bundle, PoolConfig(devices="cpu", session_options={"intra_op_num_threads": "many"}))
    with pytest.raises(LoadError, match="session_options has 'no_such'"):
        SessionPool(bundle, PoolConfig(devices="cpu", session_options={"no_such": 1}))


def test_requests_of_many_threads_get_their_own_answers(bundle):
    with (
        SessionPool(bundle, PoolConfig(devices="cpu", workers_per_device=2)) as pool,
        ThreadPoolExecutor(16) as threads,
    ):

        def ask(number):
            x = np.full((1 + number % 7, 50), number, np.float32)
            return bool((pool.run({"x": x})["y"] == 2 * number).all())

        assert all(threads.map(ask, range(2000)))
        assert pool.stats().pending == 0


def test_requests_that_never_fit_are_refused(bundle):
    huge = np.broadcast_to(np.float32(1), (2**20, 2**11))  # 8 GiB, of which it has 4 bytes
    with SessionPool(bundle, PoolConfig(devices="cpu")) as pool:
        with pytest.raises(NoRoomError, match="does not fit a request"):
            pool.run({"x": huge})
        assert pool.stats().workers[0].restarts == 0


def test_inputs_are_checked_by_name_and_type(bundle):
    with SessionPool(bundle, PoolConfig(devices="cpu")) as pool:
        with pytest.raises(InvalidRequestError, match=r"expected x, got z"):
            pool.run({"z": np.ones((1, 1), np.float32)})
        with pytest.raises(InvalidRequestError, match="expected float32, got float64"):
            pool.run({"x": np.ones((1, 1))})
        with pytest.raises(InvalidRequestError, match="expected float32, got <U1"):
            pool.run({"x": np.array([["a"]])})
        with pytest.raises(RunError, match=r"Invalid rank(?s:.)*INVALID|INVALID(?s:.)*[Rr]ank"):
            pool.run({"x": np.ones(3, np.float32)})
        with pytest.raises(InvalidRequestError, match="which model"):
            pool.run({}, model="other")
        assert (pool.run(batch())["y"] == 2 * batch()["x"]).all()


@pytest.mark.attack
@pytest.mark.parametrize("wrong", [{"timeout_s": "5"}, {"timeout_s": math.nan}, {"retries": "1"}])
def test_what_is_no_number_is_refused_before_it_waits(bundle, wrong):
    with SessionPool(bundle, PoolConfig(devices="cpu")) as pool:
        with pytest.raises(PoolError, match=f"bad {next(iter(wrong))}"):
            pool.run(batch(), **wrong)
        assert pool.stats().pending == 0


def test_several_models_are_routed(tmp_path):
    negative = write_model_bundle(
        tmp_path / "negative",
        {"z": ("Neg", ("x",))},
        {"x": ("float32", ("a", "b"))},
        {"z": ("float32", ("a", "b"))},
        {"input:x": np.ones((1, 1), np.float32), "output:z": -np.ones((1, 1), np.float32)},
    )
    bundles = {"twice": write_doubling(tmp_path / "doubling"), "minus": negative}
    with SessionPool(bundles, PoolConfig(devices="cpu", workers_per_device=2)) as pool:
        assert pool.models == ("twice", "minus")
        x = np.full((64, 1024), 3, np.float32)
        assert (pool.run({"x": x}, model="twice")["y"] == 6).all()
        assert (pool.run({"x": x}, model="minus")["z"] == -3).all()
        with pytest.raises(InvalidRequestError, match="which model"):
            pool.run({"x": x})


def test_deadlines_hold_for_what_waits_and_for_what_runs(bundle):
    with SessionPool(bundle, PoolConfig(devices="cpu", worker=BAD)) as pool:
        with pytest.raises(RequestTimeoutError, match="cpu/0 has it"):
            pool.run(batch(bad_workers.BLOCK), timeout_s=2)
        blocking = [submit(pool, batch(bad_workers.BLOCK)) for _ in range(3)]
        wait_for(lambda: pool.stats().workers[0].in_flight == 2, what="both lanes are in use")
        with pytest.raises(RequestTimeoutError, match="waiting for a worker"):
            pool.run(batch(), timeout_s=0.1)
        bad_workers.unblock(bundle)
        for future in blocking:
            future.result()
        assert (pool.run(batch())["y"] == 2 * batch()["x"]).all()


def test_close_answers_what_was_taken_and_takes_nothing_more(bundle):
    pool = SessionPool(bundle, PoolConfig(devices="cpu", worker=BAD))
    futures = [submit(pool, batch(bad_workers.SLOW)) for _ in range(3)]
    pool.close()
    assert all(future.result(60) for future in futures)
    with pytest.raises(PoolClosedError, match="closed"):
        pool.run(batch())
    pool.close()


def test_an_exception_fails_what_was_taken_and_the_pool_can_be_closed_again(bundle):
    pool = SessionPool(bundle, PoolConfig(devices="cpu", worker=BAD))
    futures = [submit(pool, batch(bad_workers.HANG)) for _ in range(5)]
    with pytest.raises(KeyboardInterrupt), pool:
        raise KeyboardInterrupt
    assert all(isinstance(future.exception(60), PoolClosedError) for future in futures)
    pool.close()


def test_a_pool_that_is_forgotten_ends_its_workers(bundle):
    pool = SessionPool(bundle, PoolConfig(devices="cpu"))
    pool.run(batch())
    (worker,) = pool.stats().workers
    ticks = start_ticks(worker.pid)
    del pool
    gc.collect()
    pid = worker.pid
    wait_for(lambda: start_ticks(pid) != ticks, what="its worker ends")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": "tpu"}, "no such device"),
        ({"workers_per_device": 0}, "workers_per_device"),
        ({"min_ready": 2}, "min_ready"),
        ({"workers_per_device": 1.5}, "expected a whole number from 1, got 1.5"),
        ({"workers_per_device": True}, "expected a whole number from 1, got True"),
        ({"run_timeout_s": True}, "expected a number above 0, got True"),
        ({"max_restarts": -1}, "expected a whole number from 0, got -1"),
        ({"run_timeout_s": math.nan}, "bad run_timeout_s\n  expected a number above 0, got nan"),
        ({"start_timeout_s": "60"}, "expected a number above 0, got '60'"),
    ],
)
def test_arguments_are_checked_before_anything_is_started(bundle, arguments, message):
    with pytest.raises(PoolError, match=message):
        SessionPool(bundle, PoolConfig(**{"devices": "cpu", **arguments}))


def test_an_output_that_is_an_input_is_this_requests_every_time(tmp_path):
    x = np.ones((2, 2), np.float32)
    both = ("float32", ("a", "b"))
    path = write_model_bundle(
        tmp_path / "passing",
        {"y": ("Add", ("x", "x"))},
        {"x": both},
        {"x": both, "y": both},
        {"input:x": x, "output:x": x, "output:y": x + x},
    )
    with SessionPool(path, PoolConfig(devices="cpu")) as pool:
        for n in range(8):
            answer = pool.run({"x": np.full((200, 300), n, np.float32)})
            assert (answer["x"] == n).all()
            assert (answer["y"] == 2 * n).all()


# -- requests are answered in the precision that was asked for


@pytest.fixture
def converted(tmp_path):
    return write_converted(tmp_path / "bundle")


def test_f22_requests_are_answered_in_the_precision_that_was_asked_for(converted):
    with SessionPool(converted, PoolConfig(devices="cpu", precision="int8")) as pool:
        (worker,) = pool.stats().workers
        assert worker.variants == {"linear": "cpu-int8"}
        answer = pool.run({"x": batch_of(4)})["y"]
        np.testing.assert_allclose(answer, batch_of(4) @ weights_of(1), rtol=1e-4, atol=1e-4)


def opened(folder):
    """The model in this process, as a worker on the CPU opens it."""
    load = ModelLoadOptions(precision="fp32", digests="off", threads=1)
    return open_model(str(folder), load, name="m")


def test_f24_a_variant_whose_own_golden_sample_is_wrong_neither_opens_nor_passes_a_check(converted):
    model = opened(converted)
    model.check()
    wrong = {"input:x": batch_of(8), "output:y": batch_of(8) @ weights_of(1)}
    write_tensors(converted / "cpu/golden.npz", wrong)
    with pytest.raises(LoadError, match=r"'cpu'.*does not answer as recorded"):
        model.check()
    with pytest.raises(LoadError, match=r"'cpu'.*does not answer as recorded"):
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


@pytest.mark.attack
def test_a_pool_that_is_interrupted_as_it_starts_says_so_and_leaves_no_worker(bundle, monkeypatch):
    start = Worker.start

    def interrupt(self, *rest):
        if self.name == "cpu/1":
            raise KeyboardInterrupt
        start(self, *rest)

    monkeypatch.setattr(Worker, "start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        SessionPool(bundle, PoolConfig(devices="cpu", workers_per_device=2))


PROGRAM = """
import os, sys, numpy
from ortprep.runtime import PoolConfig, SessionPool
if sys.argv[2] == "closed":
    os.closerange(0, 3)
with SessionPool(sys.argv[1], PoolConfig(devices="cpu", threads=int(sys.argv[3]))) as pool:
    assert pool.run({"x": numpy.ones((1, 4), numpy.float32)})["y"].shape == (1, 4)
"""


@pytest.mark.attack
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("streams", ["closed", "open"])
def test_a_program_needs_no_standard_streams_and_its_workers_leave_nothing_open(bundle, threads, streams):
    done = run_python(PROGRAM, bundle, streams, threads, PYTHONDEVMODE="1")
    assert (done.returncode, done.stderr) == (0, "")
