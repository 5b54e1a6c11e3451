"""A host answers as `load` does, starts once, ends by itself, and may be killed at any moment."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from ortprep.errors import (
    HostDiedError,
    HostError,
    IntegrityError,
    InvalidRequestError,
    LoadError,
    RequestTimeoutError,
    RunError,
)
from ortprep.runtime import connect, packets
from ortprep.runtime.host.models import HostConfig, ModelTable
from ortprep.runtime.host.process import read_status, stop_host
from ortprep.runtime.loading.load_options import NO_DEADLINE
from ortprep.runtime.tensors.element_types import BFLOAT16
from tests.fakes import wait_for
from tests.runtime.builders import ROWS, assert_answers, batch_of, sample, weights_of, write_bundle
from tests.runtime.dropin.builders import run_python
from tests.runtime.host.conftest import freeze_host, host_in_this_process, hosts, kill_host

pytestmark = pytest.mark.runtime


def test_answers_are_those_of_the_model_whether_they_fit_a_packet_or_not(bundle):
    with connect(bundle, start=True) as session:
        for rows in (1, 0, 3, 20_000, 2, 50_000):
            x = batch_of(rows)
            for names in (None, ["y"]):
                (y,) = session.run(names, {"x": x})
                np.testing.assert_allclose(y, x @ weights_of(0), rtol=1e-4, atol=1e-5)
        y[:] = 0  # an array of the caller's own
        turned = np.asfortranarray(x).astype(">f4")
        np.testing.assert_allclose(
            session.run(None, {"x": turned})[0], x @ weights_of(0), rtol=1e-4, atol=1e-5
        )


def test_a_client_imports_no_onnxruntime_and_few_modules(bundle):
    connect(bundle, start=True).close()
    program = (
        "import numpy, sys; before = set(sys.modules)\n"
        "from ortprep.runtime import connect\n"
        "with connect(sys.argv[1]) as session:\n"
        f"    session.run(None, {{'x': numpy.zeros((20_000, {ROWS}), numpy.float32)}})\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = run_python(program, bundle)
    assert done.returncode == 0, done.stderr
    own = {name for name in done.stdout.split() if name.startswith("ortprep")}
    assert own == {
        "ortprep",
        "ortprep.bundle",
        "ortprep.bundle.file_lock",
        "ortprep.bundle.file_memory",
        "ortprep.runtime",
        "ortprep.runtime.host",
        "ortprep.runtime.host.client",
        "ortprep.runtime.host.folder",
        "ortprep.runtime.packets",
        "ortprep.runtime.descriptors",
    }
    assert set(done.stdout.split()) - own <= {"__future__", "_socket", "errno", "fcntl", "mmap"}


@pytest.mark.attack
def test_a_program_without_standard_streams_can_start_a_host(bundle):
    program = (
        "import os, sys, numpy\n"
        "from ortprep.runtime import connect\n"
        "os.closerange(0, 3)\n"
        "session = connect(sys.argv[1], start=True)\n"
        f"session.run(None, {{'x': numpy.zeros((2, {ROWS}), numpy.float32)}})\n"
    )
    assert run_python(program, bundle).returncode == 0
    program = program.replace("os.closerange(0, 3)", "")
    assert run_python(program, bundle, PYTHONDEVMODE="1").stderr == ""  # nor has it to close its session


def test_what_is_refused_is_an_error_and_the_session_goes_on(bundle):
    with connect(bundle, start=True) as session:
        with pytest.raises(RunError, match="ONNX Runtime cannot run linear"):
            session.run(None, {"x": np.zeros((2, ROWS + 1), np.float32)})
        for names, feeds, problem in (
            (["z"], {"x": sample()}, "no such output: 'z'"),
            (None, {}, "expected x, got none"),
            (None, {"x": sample().astype(np.float64)}, "expected float32, got float64"),
            (None, {"x": np.array(["a"])}, "expected numbers or booleans"),
            (None, {"x": np.zeros((2**40, 0), np.float32)}, "empty and too large"),
        ):
            with pytest.raises(InvalidRequestError, match=problem):
                session.run(names, feeds)
        assert session.run(None, {"x": sample()})[0].shape == (2, 4)
    with pytest.raises(HostError, match="session is closed"):
        session.run(None, {"x": sample()})
    with pytest.raises(LoadError, match="no model of this name: 'linear'"):
        connect("linear")


def dtype_of(kind):
    """The type of numpy, or that of a package which a job need not have."""
    if kind in ("float8_e4m3fn", "int4", "bfloat16"):
        return getattr(pytest.importorskip("ml_dtypes"), kind)
    return kind


@pytest.mark.attack
@pytest.mark.parametrize(
    "kind",
    [
        *(np.longdouble, np.clongdouble, "V8", "M8[s]", object, "float8_e4m3fn", "int4"),
        *([("a", "f4")], [("bfloat16", "f4"), ("b", "f4")]),
    ],
)
def test_a_type_that_no_message_can_carry_is_a_bad_request_before_it_is_sent(bundle, monkeypatch, kind):
    with connect(bundle, start=True) as session:
        monkeypatch.setattr(packets, "send", lambda *_, **__: pytest.fail("sent"))
        with pytest.raises(InvalidRequestError, match="expected numbers or booleans by a name"):
            session.run(None, {"x": np.zeros((1, 4), dtype_of(kind))})


@pytest.mark.attack
@pytest.mark.parametrize("name", [1, None, "\udcff", "x" * 70_000])
def test_a_name_that_no_message_can_carry_is_a_bad_request_before_it_is_sent(bundle, monkeypatch, name):
    with connect(bundle, start=True) as session:
        monkeypatch.setattr(packets, "send", lambda *_, **__: pytest.fail("sent"))
        with pytest.raises(InvalidRequestError, match="expected numbers or booleans by a name") as caught:
            session.run(None, {name: sample()})
        assert len(str(caught.value)) < 500
        with pytest.raises(InvalidRequestError, match="name of the model is too long"):
            connect("/" + "x" * 70_000)


@pytest.mark.attack
@pytest.mark.parametrize("timeout_s", [math.inf, -math.inf, math.nan, 1e10, "3", 1j])
def test_a_timeout_that_no_clock_can_tell_is_a_bad_request(bundle, timeout_s):
    with connect(bundle, start=True) as session:
        with pytest.raises(InvalidRequestError, match="expected seconds, at most 1e"):
            session.run(None, {"x": sample()}, timeout_s=timeout_s)
        for bad in (timeout_s, None):
            with pytest.raises(InvalidRequestError, match="expected seconds"):
                connect(bundle, timeout_s=bad)
        for good in (1e9, 300, np.float32(300)):
            assert session.run(None, {"x": sample()}, timeout_s=good)[0].shape == (2, 4)


def test_both_types_of_bfloat16_are_sent_as_one(bundle):
    with connect(os.fsencode(bundle), start=True) as session:
        for kind in (dtype_of("bfloat16"), BFLOAT16):
            with pytest.raises(InvalidRequestError, match=r"expected float32, got .*bfloat16"):
                session.run(None, {"x": np.zeros((1, 8), kind)})


def test_without_a_host_a_client_says_how_to_start_one(bundle):
    for _ in range(2):
        with pytest.raises(HostError, match="no host runs") as raised:
            connect(bundle)
        assert "ortprep host" in str(raised.value)
    assert read_status() is None
    assert stop_host() is None


def test_a_damaged_bundle_is_refused_as_load_refuses_it(bundle):
    with next(bundle.glob("cpu/*.onnx")).open("ab") as file:
        file.write(b"x")
    with pytest.raises(IntegrityError):
        connect(bundle, start=True)


def test_many_clients_at_once_start_one_host(bundle, runtime_folder):
    program = (
        "import sys, numpy; from ortprep.runtime import connect\n"
        "with connect(sys.argv[1], start=True) as session:\n"
        f"    session.run(None, {{'x': numpy.zeros((1, {ROWS}), numpy.float32)}})\n"
    )
    clients = [subprocess.Popen([sys.executable, "-c", program, str(bundle)]) for _ in range(6)]
    assert [client.wait() for client in clients] == [0] * 6
    assert len(hosts(runtime_folder)) == 1
    status = read_status()
    assert status["requests"] == 6


def test_a_host_without_requests_ends_and_the_next_call_starts_another(bundle, runtime_folder):
    with connect(bundle, start=True, idle_s=0.5) as session:
        session.run(None, {"x": sample()})
        wait_for(lambda: not hosts(runtime_folder), what="the host has ended")
        assert list(runtime_folder.iterdir()) == []
        session.run(None, {"x": sample()})
        assert len(hosts(runtime_folder)) == 1


def test_after_a_kill_between_requests_the_next_one_is_answered(bundle):
    with connect(bundle, start=True) as session:
        kill_host()
        assert_answers(session)


def test_a_kill_during_a_request_is_an_error_that_says_to_call_again(bundle):
    x = batch_of(3_000_000)
    with connect(bundle, start=True) as session:
        threading.Timer(0.3, os.kill, (freeze_host(), signal.SIGKILL)).start()
        with pytest.raises(HostDiedError, match="host ended before it answered") as raised:
            session.run(None, {"x": x})
        assert "call again" in str(raised.value)
        assert_answers(session)


def test_a_deadline_ends_the_wait_and_its_answer_is_never_another_requests(bundle):
    with connect(bundle, start=True) as session:
        pid = freeze_host()
        began = time.monotonic()
        with pytest.raises(RequestTimeoutError, match=r"within 0\.2 s"):
            session.run(None, {"x": batch_of(1)}, timeout_s=0.2)
        assert time.monotonic() - began < 2
        os.kill(pid, signal.SIGCONT)
        assert_answers(session)


def test_a_bundle_that_was_replaced_answers_as_the_new_one(bundle, tmp_path):
    with connect(bundle, start=True) as session:
        session.run(None, {"x": sample()})
        other = write_bundle(tmp_path / "other", seed=1)
        bundle.rename(tmp_path / "old")
        other.rename(bundle)
        assert_answers(session, 1)
        shutil.rmtree(bundle)
        with pytest.raises(Exception, match="linear"):
            session.run(None, {"x": sample()})


def test_a_link_that_was_moved_answers_as_the_bundle_that_it_leads_to_now(bundle, tmp_path):
    other, link = write_bundle(tmp_path / "other", seed=1), tmp_path / "current"
    link.symlink_to(bundle)
    with (
        host_in_this_process(HostConfig({"named": str(link)})),
        connect(link) as by_path,
        connect("named") as by_name,
    ):
        for seed, model in enumerate((bundle, other)):
            link.unlink()
            link.symlink_to(model)
            assert_answers(by_path, seed)
            assert_answers(by_name, seed)
            status = read_status()
            assert {"name": "named", "bundle": str(model), "variant": "cpu"} in status["models"]


def test_threads_share_a_session_and_a_fork_connects_again(bundle):
    with connect(bundle, start=True) as session:

        def run(seed):
            x = batch_of(seed * 300 + 1)
            np.testing.assert_allclose(
                session.run(None, {"x": x})[0], x @ weights_of(0), rtol=1e-4, atol=1e-5
            )

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(run, range(40)))
        child = os.fork()
        if not child:
            with ThreadPoolExecutor(4) as threads:  # each has a connection of its own
                list(threads.map(run, range(20)))
            os._exit(0)
        run(2)
        assert os.waitpid(child, 0)[1] == 0


def test_a_thread_s_deadline_is_its_own(bundle):
    with connect(bundle, start=True) as session, ThreadPoolExecutor(1) as threads:
        pid = freeze_host()
        first = threads.submit(session.run, None, {"x": sample()}, timeout_s=30)
        for timeout_s in (0.2, -1):
            began = time.monotonic()
            with pytest.raises(RequestTimeoutError, match="host did not answer"):
                session.run(None, {"x": batch_of(1)}, timeout_s=timeout_s)
            assert time.monotonic() - began < 10
        os.kill(pid, signal.SIGCONT)
        np.testing.assert_allclose(first.result()[0], sample() @ weights_of(0), rtol=1e-5)


def test_stop_lets_a_busy_host_end_and_kills_one_that_hangs(bundle, runtime_folder):
    connect(bundle, start=True).close()
    pid = freeze_host()
    with pytest.raises(HostError, match=f"process {pid} did not answer"):
        read_status(timeout_s=0.1)
    assert stop_host(timeout_s=0.3) == pid
    wait_for(lambda: not hosts(runtime_folder), what="the host is gone")
    assert list(runtime_folder.iterdir()) == []


def test_the_model_that_was_unused_for_longest_is_dropped_and_loads_again(tmp_path):
    folders = [str(write_bundle(tmp_path / str(seed), seed=seed)) for seed in range(3)]
    table = ModelTable(HostConfig(models={"first": folders[0]}))
    for seed in (0, 1, 2, 0):
        with table.use(folders[seed], NO_DEADLINE) as model:
            np.testing.assert_allclose(
                model.run({"x": sample()})["y"], sample() @ weights_of(seed), rtol=1e-5
            )
    limited = ModelTable(HostConfig(max_memory_bytes=1))
    with limited.use(folders[0], NO_DEADLINE), limited.use(folders[1], NO_DEADLINE):
        assert len(limited.describe()) == 2  # in use
    with limited.use(folders[2], NO_DEADLINE):
        assert [model["bundle"] for model in limited.describe()] == [folders[2]]
    assert [table.find_folder(model) for model in ("first", folders[1])] == folders[:2]


# -- programs ask while the host is killed again and again

CLIENT = """\
import json, sys
import numpy as np
from ortprep.errors import HostDiedError
from ortprep.runtime import connect
bundle, weights, seed, count = sys.argv[1], np.load(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
random, found, session = np.random.default_rng(seed), {"right": 0, "wrong": 0, "died": 0}, None
while found["right"] < count:
    x = random.standard_normal((int(random.choice([1, 3, 50, 20_000])), 8)).astype(np.float32)
    try:
        session = session or connect(bundle, start=True)
        (y,) = session.run(None, {"x": x})
        is_right = y.shape == (len(x), 4) and np.allclose(y, x @ weights, rtol=1e-3, atol=1e-4)
        found["right" if is_right else "wrong"] += 1
        if found["right"] % 50 == 0:
            session = session.close()
    except HostDiedError:
        found["died"] += 1
print(json.dumps(found))
"""


@pytest.mark.slow
def test_no_answer_is_wrong_and_no_program_hangs_while_the_host_is_killed(bundle, tmp_path):
    np.save(tmp_path / "weights.npy", weights_of(0))
    command = [sys.executable, "-c", CLIENT, str(bundle), str(tmp_path / "weights.npy")]
    clients = [
        subprocess.Popen([*command, str(seed), "300"], stdout=subprocess.PIPE, text=True) for seed in range(3)
    ]
    kills = 0
    end = time.monotonic() + 400
    while any(client.poll() is None for client in clients):
        assert time.monotonic() < end
        time.sleep(1)
        with suppress(HostError, ProcessLookupError):
            status = read_status()
            if status is not None:
                os.kill(status["pid"], signal.SIGKILL)
                kills += 1
    for client in clients:
        found = json.loads(client.communicate()[0])
        assert (client.returncode, found["right"], found["wrong"]) == (0, 300, 0)
    assert kills > 1
