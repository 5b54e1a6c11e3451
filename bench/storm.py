"""Does anything go wrong while workers are killed? `python -m bench.storm [--forks 10000]`.

Silero VAD from its wheel, prepared without a search. *forks*: children of a process that called
`load_before_fork`, four at a time, each of which answers once; every fourth ends with its interpreter.
*server*: an unmodified FastAPI application in `gunicorn --preload` under `ORTPREP_FORK=1 ortprep run`, whose
three workers are also replaced after 500 requests. *pool*: a `SessionPool` of two forked workers; every tenth
time the template is killed in their place. *host*: threads that `connect(…, start=True)`. In each, SIGKILL
ends a process every second; requests that die with it are sent again. Every answer is compared, byte by byte,
with that of a session in this process, which plain ONNX Runtime confirms.

It runs in namespaces of its own (`unshare`), so that `/dev/shm`, `/tmp` and the process table hold nothing of
others, and 64 MB at most in `/dev/shm`: what is there after a part and was not before it is left behind.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.models import ARTIFACTS, PreparedModel
from bench.result_file import describe_machine, format_results
from bench.small_models import prepare_small_models
from ortprep.errors import HostDiedError, HostError, RequestTimeoutError
from ortprep.runtime import PoolConfig, SessionPool, connect, load_before_fork
from ortprep.runtime.host.client import HostSession
from ortprep.runtime.host.process import read_status, stop_host

TIMEOUT_S = 60.0
"""Seconds after which a request or a child hangs."""

PARTS = ("forks", "server", "pool", "host")
_SHARES = {"server": 0.2, "pool": 0.6, "host": 0.2}
_THREADS = {"server": 6, "pool": 16, "host": 4}
_CASES = 64
_LEAVING_S = 20.0
_NAMESPACE = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp && "$@"; exit $?'

_FORKS = """\
import json, os, random, select, signal, sys, time
from collections import Counter
from ortprep.runtime import load_before_fork
session = load_before_fork(sys.argv[1])
import numpy
forks, interval_s, timeout_s = int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
with numpy.load(sys.argv[2]) as file:
    chunks, state, answers = file["chunks"], file["state"], [row.tobytes() for row in file["answers"]]
found, started, number = Counter(wrong=0, hung=0), time.monotonic(), 0
kill_s = started + interval_s
while number < forks:
    children = {}
    for place in range(4):
        case = number % len(answers)
        number += 1
        pid = os.fork()
        if pid == 0:
            outputs = session.run(None, {"input": chunks[case], "state": state, "sr": numpy.array(16000)})
            code = int(b"".join(output.tobytes() for output in outputs) != answers[case])
            sys.exit(code) if place == 0 else os._exit(code)
        children[pid] = os.pidfd_open(pid)
    if time.monotonic() > kill_s:
        kill_s += interval_s
        time.sleep(random.random() * 0.001)
        os.kill(pid, signal.SIGKILL)
        found["kills"] += 1
    for pid, descriptor in children.items():
        if not select.select([descriptor], [], [], timeout_s)[0]:
            found["hung"] += 1
            os.kill(pid, signal.SIGKILL)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found[{0: "right", 1: "wrong", -9: "killed"}.get(code, f"exit code {code}")] += 1
print(json.dumps({**found, "forks": number, "elapsed_s": time.monotonic() - started}))
"""

_APPLICATION = """\
import os, time
import numpy as np
import onnxruntime
from fastapi import FastAPI, Request, Response

session = onnxruntime.InferenceSession(os.environ["MODEL"])
native, born = id(session._sess), {}
app = FastAPI()


@app.post("/")
async def find_speech(request: Request) -> Response:
    chunk = np.frombuffer(await request.body(), np.float32).reshape(1, 576)
    feeds = {"input": chunk, "state": np.zeros((2, 1, 128), np.float32), "sr": np.array(16000)}
    body = b"".join(output.tobytes() for output in session.run(None, feeds))
    since = born.setdefault(os.getpid(), time.monotonic_ns())
    is_inherited = id(session._sess) == native
    return Response(body, headers={"worker": f"{os.getpid()} {since} {is_inherited}"})
"""


class LostError(Exception):
    """A request ended with its worker, and may be sent again."""


Ask = Callable[[int], bytes]
"""Sends the request of a case and returns the bytes of its answer; raises `LostError` or `TimeoutError`."""


@dataclass(frozen=True)
class Cases:
    """Requests with their right answers.

    Attributes:
        model: The prepared model.
        feeds: Inputs of each request.
        answers: Bytes of all outputs of each, one after another.
    """

    model: PreparedModel
    feeds: tuple[Mapping[str, NDArray[Any]], ...]
    answers: tuple[bytes, ...]


def make_cases(model: PreparedModel) -> Cases:
    """Draws requests and computes their answers, which plain ONNX Runtime confirms."""
    import onnxruntime

    random, state = np.random.default_rng(0), np.zeros((2, 1, 128), np.float32)
    chunks = random.uniform(-0.3, 0.3, (_CASES, 1, 576)).astype(np.float32)
    feeds = tuple({"input": chunk, "state": state, "sr": np.array(16000)} for chunk in chunks)
    session, plain = load_before_fork(model.bundle), onnxruntime.InferenceSession(model.source)
    outputs = [session.run(None, one) for one in feeds]
    for one, found in zip(feeds, outputs, strict=True):
        for expected, got in zip(plain.run(None, one), found, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
    answers = tuple(_join(found) for found in outputs)
    assert len(set(answers)) == _CASES
    return Cases(model, feeds, answers)


def _join(outputs: Sequence[Any]) -> bytes:
    return b"".join(np.asarray(output).tobytes() for output in outputs)


def storm(
    cases: Cases,
    open_client: Callable[[], Ask],
    find_victim: Callable[[int], int | None],
    *,
    requests: int,
    threads: int,
    interval_s: float,
) -> dict[str, Any]:
    """Sends requests from several threads while a process is killed every so often.

    Args:
        cases: What is asked.
        open_client: Makes what a thread asks with.
        find_victim: Returns the process to kill, given how many were killed; None for none now.
        requests: Number of requests that are answered, right or wrong.
        threads: Number of threads.
        interval_s: Seconds between two kills.
    """
    found = Counter({"wrong": 0, "hung": 0})
    lock, is_over, started = threading.Lock(), threading.Event(), time.monotonic()

    def send(thread: int) -> None:
        mine: Counter[str] = Counter()
        ask = open_client()
        share = requests // threads + (thread < requests % threads)
        while mine["right"] + mine["wrong"] < share and mine["hung"] < 3:
            case = (thread * 7 + mine.total()) % _CASES
            try:
                mine["right" if ask(case) == cases.answers[case] else "wrong"] += 1
            except LostError:
                mine["sent again"] += 1
            except (TimeoutError, RequestTimeoutError):
                mine["hung"] += 1
            except Exception as error:  # noqa: BLE001  each is a finding
                mine[f"{type(error).__name__}: {error}"[:200]] += 1
                time.sleep(0.01)
                if time.monotonic() > started + 1800:
                    break
        with lock:
            found.update(mine)

    def kill() -> None:
        while not is_over.wait(interval_s):
            with suppress(ProcessLookupError, FileNotFoundError, HostError):
                victim = find_victim(found["kills"])
                if victim is not None:
                    os.kill(victim, signal.SIGKILL)
                    found["kills"] += 1

    senders = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(threads)]
    killer = threading.Thread(target=kill)
    for thread in (killer, *senders):
        thread.start()
    for sender in senders:
        sender.join(1900)
    is_over.set()
    killer.join()
    found["hung"] += sum(sender.is_alive() for sender in senders)
    return {**found, "threads": threads, "elapsed_s": time.monotonic() - started}


def storm_forks(cases: Cases, *, forks: int, interval_s: float) -> dict[str, Any]:
    """Forks a process with an inherited session, again and again."""
    with TemporaryDirectory(prefix="storm-") as folder:
        path = Path(folder) / "cases.npz"
        chunks = np.stack([feeds["input"] for feeds in cases.feeds])
        answers = np.stack([np.frombuffer(answer, np.uint8) for answer in cases.answers])
        np.savez(path, chunks=chunks, state=cases.feeds[0]["state"], answers=answers)
        arguments = [str(cases.model.bundle), str(path), str(forks), str(interval_s), str(TIMEOUT_S)]
        done = subprocess.run(
            [sys.executable, "-c", _FORKS, *arguments], stdout=subprocess.PIPE, text=True, check=True
        )
        return dict(json.loads(done.stdout))


def storm_server(cases: Cases, **options: Any) -> dict[str, Any]:
    """Asks an unmodified application whose workers inherit its session."""
    workers: set[str] = set()
    bodies = [feeds["input"].tobytes() for feeds in cases.feeds]
    with TemporaryDirectory(prefix="storm-") as folder, serving(Path(folder), cases) as (port, master):

        def find_victim(count: int) -> int | None:
            found = Path(f"/proc/{master}/task/{master}/children").read_text().split()
            return int(found[count % len(found)]) if found else None

        result = storm(cases, lambda: _HttpClient(port, bodies, workers).ask, find_victim, **options)
    result["workers"] = len(workers)
    result["workers that did not inherit"] = sum(not worker.endswith(" True") for worker in workers)
    return result


class _HttpClient:
    """A client with a connection that it keeps."""

    def __init__(self, port: int, bodies: Sequence[bytes], workers: set[str]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._bodies, self._workers = bodies, workers

    def ask(self, case: int) -> bytes:
        """Does as `Ask`."""
        try:
            self._connection.request("POST", "/", self._bodies[case])
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if isinstance(error, TimeoutError):
                raise
            time.sleep(0.002)
            raise LostError from error
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {body[:100]!r}")
        self._workers.add(answer.headers["worker"])
        return body


@contextmanager
def serving(folder: Path, cases: Cases) -> Iterator[tuple[int, int]]:
    """Runs the application; yields its port and its master's process."""
    (folder / "app.py").write_text(_APPLICATION, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "ortprep", "run", "--bundles", str(cases.model.bundle), "--"]
    command += [sys.executable, "-m", "gunicorn", "app:app", "--preload", "--workers", "3"]
    command += ["--worker-class", "uvicorn_worker.UvicornWorker", "--max-requests", "500"]
    command += ["--bind", f"127.0.0.1:{port}", "--log-level", "warning"]
    environment = {**os.environ, "MODEL": str(cases.model.source), "ORTPREP_FORK": "1"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + TIMEOUT_S
        while True:
            with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.1)
        yield port, server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(TIMEOUT_S)
        finally:
            server.kill()


def storm_pool(cases: Cases, **options: Any) -> dict[str, Any]:
    """Asks a pool whose workers are forked from a template."""
    config = PoolConfig(devices="cpu", workers_per_device=2, threads=1, max_restarts=10**6)
    with SessionPool(cases.model.bundle, config) as pool:

        def ask(case: int) -> bytes:
            answer = pool.run(cases.feeds[case], retries=100, timeout_s=TIMEOUT_S)
            return _join(tuple(answer.values()))

        def find_victim(count: int) -> int | None:
            ready = [worker.pid for worker in pool.stats().workers if worker.state == "ready"]
            if not ready or (worker := ready[count % len(ready)]) is None:
                return None
            parent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
            return parent if count % 10 == 9 and parent not in (1, os.getpid()) else worker

        result = storm(cases, lambda: ask, find_victim, **options)
        stats = pool.stats()
    result["restarts"] = sum(worker.restarts for worker in stats.workers)
    result["requests at the end"] = stats.pending
    return result


def storm_host(cases: Cases, **options: Any) -> dict[str, Any]:
    """Asks a host that clients start again when it is killed."""

    def open_client() -> Ask:
        session: HostSession | None = None

        def ask(case: int) -> bytes:
            nonlocal session
            try:
                if session is None:
                    session = connect(cases.model.bundle, start=True, timeout_s=TIMEOUT_S)
                return _join(session.run(None, cases.feeds[case]))
            except HostDiedError as error:
                raise LostError from error

        return ask

    def find_victim(_: int) -> int | None:
        status = read_status()
        return None if status is None else int(status["pid"])

    result = storm(cases, open_client, find_victim, **options)
    stop_host()
    return result


def find_everything() -> set[str]:
    """Returns what is in the folders that programs may leave files in, and in the process table."""
    found = {str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).rglob("*")}
    runtime = Path(os.environ["XDG_RUNTIME_DIR"])
    found = {path for path in found if not (Path(path).is_relative_to(runtime) and Path(path).is_dir())}
    return found | {f"process {path.name}" for path in Path("/proc").glob("[0-9]*")}


def find_left(before: set[str]) -> list[str]:
    """Returns what there is more than before, after a while in which it may go."""
    end = time.monotonic() + _LEAVING_S
    while (left := find_everything() - before) and time.monotonic() < end:
        time.sleep(0.2)
    return sorted(left)


def measure(parts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Goes through the parts and returns what came of each."""
    (model,) = prepare_small_models(("silero-vad",), options.artifacts.absolute(), reuse=True)
    cases, found = make_cases(model), {}
    run = {"server": storm_server, "pool": storm_pool, "host": storm_host}
    for part in parts:
        before = find_everything()
        if part == "forks":
            found[part] = storm_forks(cases, forks=options.forks, interval_s=options.kill_every)
        else:
            found[part] = run[part](
                cases,
                requests=round(options.requests * _SHARES[part]),
                threads=_THREADS[part],
                interval_s=options.kill_every,
            )
        found[part]["left behind"] = find_left(before)
        print(f"{part:<8} {found[part]}", flush=True)
    return found


def is_sound(found: Mapping[str, Any]) -> bool:
    """Says whether nothing of a part was wrong, hung, failed otherwise or was left behind."""
    known = {"right", "sent again", "kills", "killed", "forks", "workers", "restarts", "threads", "elapsed_s"}
    return found["right"] > 0 and not any(value for name, value in found.items() if name not in known)


def main(arguments: Sequence[str] | None = None) -> int:
    """Goes through the storm and reports; returns 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.storm", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--forks", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=100_000, help="of server, pool and host together")
    parser.add_argument("--kill-every", type=float, default=1.0, metavar="S")
    parser.add_argument("--here", action="store_true", help="in the namespaces of this process")
    parser.add_argument("--artifacts", type=Path, default=ARTIFACTS / "small")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    if not options.here:
        if options.out and options.out.absolute().is_relative_to("/tmp"):
            parser.error("--out is in /tmp, which is another folder there")
        command = [sys.executable, "-m", "bench.storm", "--here", *(arguments or sys.argv[1:])]
        unshare = ["unshare", *(["-r"] if os.getuid() else []), "-mpf", "--mount-proc"]
        os.execvp("unshare", [*unshare, "sh", "-c", _NAMESPACE, "sh", *command])
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    with TemporaryDirectory(prefix="storm-run-") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        found = measure(options.parts, options)
    if options.out:
        report = {
            "question": "does anything go wrong while workers are killed?",
            "machine": describe_machine(),
            "load_average": os.getloadavg(),
            "kill_every_s": options.kill_every,
            "parts": found,
        }
        options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    return 0 if all(map(is_sound, found.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
