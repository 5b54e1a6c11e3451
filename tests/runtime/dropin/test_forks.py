"""Applications that know nothing of bundles, whose masters create the sessions that forked workers run."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest

from tests.fakes import free_port
from tests.runtime.builders import weights_of
from tests.runtime.dropin.builders import (
    BUNDLE_SEED,
    REPOSITORY,
    SOURCE_SEED,
    run_python,
    write_bundle_of,
    write_source,
)

APPLICATION = """
import os, sys, numpy as np, onnxruntime
session = onnxruntime.InferenceSession(os.environ["MODEL"])
native, master = id(session._sess), os.getpid()

def answer(scale):
    (output,) = session.run(None, {"x": np.full((2, 8), scale, np.float32)})
    return output.sum().item(), os.getpid(), os.getpid() != master and id(session._sess) == native
"""

SERVER = (
    APPLICATION
    + """
from fastapi import FastAPI
app = FastAPI()

@app.get("/answer/{scale}")
def handle(scale: float):
    return answer(scale)
"""
)


def expected(scale, seed=BUNDLE_SEED):
    return float((np.full((2, 8), scale, np.float32) @ weights_of(seed)).sum())


def variables_of(folder):
    """Returns the environment of an application whose model has a bundle, and that forks its workers."""
    model = write_source(folder / "model.onnx")
    write_bundle_of(model, folder / "bundles" / "b")
    # As `ortprep run` starts it.
    startup = REPOSITORY / "pipeline/ortprep/runtime/dropin/startup"
    return {
        "MODEL": str(model),
        "ORTPREP_BUNDLES": str(folder / "bundles"),
        "ORTPREP_FORK": "1",
        "ORTPREP_AT_IMPORT": "ortprep.runtime.dropin.session:install_in",
        "ORTPREP_CACHE_DIR": str(folder / "cache"),
        "ORT_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": os.pathsep.join([str(startup), str(REPOSITORY), str(REPOSITORY / "pipeline")]),
    }


@pytest.mark.runtime
def test_a_pool_of_forks_runs_what_its_parent_created(tmp_path):
    script = (
        APPLICATION
        + """
import json, multiprocessing
assert session.get_session_options().intra_op_num_threads == 1
with multiprocessing.get_context("fork").Pool(3, maxtasksperchild=5) as pool:
    print(json.dumps(pool.map(answer, [i / 8 for i in range(40)], chunksize=1)))
    pool.close()
    pool.join()
"""
    )
    done = run_python(script, **variables_of(tmp_path))
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert np.allclose([value for value, _, _ in answers], [expected(i / 8) for i in range(40)], atol=1e-3)
    assert all(is_inherited for _, _, is_inherited in answers)
    assert len({pid for _, pid, _ in answers}) >= 8


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("asked", "said"),
    [("intra_op_num_threads = 4", "intra_op_num_threads"), ("enable_mem_pattern = False", "")],
)
def test_an_application_that_asks_for_threads_has_them_and_is_warned(tmp_path, asked, said):
    script = f"""
import os, onnxruntime
options = onnxruntime.SessionOptions()
options.{asked}
session = onnxruntime.InferenceSession(os.environ["MODEL"], options)
print(hasattr(session, "_ortprep_forks"), session.get_session_options().intra_op_num_threads)
"""
    done = run_python(script, **variables_of(tmp_path))
    assert done.stdout.split() == [str(not said), "4" if said else "1"], done.stderr
    assert ("no fork can run the session" in done.stderr and f"asks for {said}" in done.stderr) == bool(said)


@pytest.mark.runtime
def test_install_asks_for_forks_in_code_and_warns_of_a_session_without_a_bundle(tmp_path):
    variables = {name: value for name, value in variables_of(tmp_path).items() if name != "ORTPREP_FORK"}
    script = "from ortprep.runtime import install; install(fork=True)\n" + APPLICATION
    done = run_python(script + "assert session._ortprep_forks", **variables)
    assert done.returncode == 0, done.stderr
    other = write_source(tmp_path / "other" / "model.onnx", seed=SOURCE_SEED + 1)
    done = run_python(script, **{**variables, "MODEL": str(other)})
    assert (done.returncode, "plain session of" in done.stderr) == (0, True)


@contextlib.contextmanager
def serving(command, variables, folder):
    """Runs a server in a session of its own; asserts that it ends with all its processes when asked to."""
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            stderr=log,
            stdout=log,
            start_new_session=True,
        )
    try:
        yield server
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, (folder / "log").read_text()
        with pytest.raises(ProcessLookupError):
            os.killpg(server.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def ask(url):
    """Returns an answer; None if the worker was killed or is gone."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            value, pid, is_inherited = json.load(answer)
            return value, pid, is_inherited
    except TimeoutError:
        pytest.fail("a request hung")
    except (OSError, http.client.HTTPException):
        return None


@pytest.mark.slow
def test_gunicorn_recycles_and_loses_workers_that_inherit_the_session(tmp_path):
    requests = 400
    (tmp_path / "app.py").write_text(SERVER)
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "3", "--bind", f"127.0.0.1:{port}"]
    command += ["--worker-class", "uvicorn_worker.UvicornWorker", "--max-requests", "25", "app:app"]
    answers = []
    with serving(command, variables_of(tmp_path), tmp_path):
        url = f"http://127.0.0.1:{port}/answer/"
        deadline = time.monotonic() + 60
        while ask(f"{url}1.0") is None:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)

        def send(start):
            for index in range(start, requests, 4):
                while (answer := ask(f"{url}{index / 8}")) is None:
                    time.sleep(0.05)
                answers.append((index / 8, answer))
                if index % 40 == start:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(answer[1], signal.SIGKILL)

        threads = [threading.Thread(target=send, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), "a request hung"
    assert len(answers) == requests
    assert all(abs(value - expected(scale)) < 1e-2 for scale, (value, _, _) in answers)
    assert all(is_inherited for _, (_, _, is_inherited) in answers)
    assert len({pid for _, (_, pid, _) in answers}) >= requests // 40
