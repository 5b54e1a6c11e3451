"""Many requests from many threads, each answer checked: does a pool serve, and how fast?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.bundle.loader_config import read_loader_config
from pipeline.errors import PoolClosedError
from pipeline.runtime.element_types import Array

if TYPE_CHECKING:
    from pipeline.runtime.pool.crew import PoolStats, WorkerEvent
    from pipeline.runtime.pool.session_pool import SessionPool

_KEPT = 10


@dataclass
class Drive:
    """What came of many requests.

    Attributes:
        requests: How many were made.
        elapsed_s: From the first call to the last answer.
        wrong: How many answers were wrong.
        failed: How many requests failed.
        problems: What was wrong with the first of either.
    """

    requests: int
    elapsed_s: float = 0.0
    wrong: int = 0
    failed: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        """Requests per second."""
        return self.requests / self.elapsed_s if self.elapsed_s else 0.0


def drive_bundle(
    bundle: Path,
    *,
    devices: str | Sequence[str],
    workers_per_device: int,
    requests: int,
    clients: int,
    observer: Callable[[WorkerEvent], None],
) -> tuple[Drive, PoolStats]:
    """Makes a pool of a bundle, drives it with the golden sample, and returns what came of it.

    Raises:
        PipelineError: As `SessionPool` does.
    """
    from pipeline.runtime.golden import find_problems, read_golden
    from pipeline.runtime.pool.session_pool import SessionPool

    config = read_loader_config(bundle)
    inputs, expected = read_golden(config, bundle)
    with SessionPool(
        bundle, devices=devices, workers_per_device=workers_per_device, observer=observer
    ) as pool:
        result = drive(
            pool,
            inputs,
            lambda answer: find_problems(config, expected, answer),
            requests=requests,
            clients=clients,
        )
        return result, pool.stats()


def drive(
    pool: SessionPool,
    inputs: Mapping[str, Array],
    check: Callable[[Mapping[str, Array]], list[str]],
    *,
    requests: int,
    clients: int,
    retries: int = 0,
) -> Drive:
    """Makes requests from several threads until so many are made.

    Args:
        pool: A pool of one model.
        inputs: What every request brings.
        check: Returns what is wrong with an answer.
        requests: How many.
        clients: How many threads.
        retries: Of each request.
    """
    result, lock, left = Drive(requests), threading.Lock(), [requests]

    def is_one_left() -> bool:
        with lock:
            left[0] -= 1
            return left[0] >= 0

    def note(kind: str, problems: list[str]) -> None:
        with lock:
            setattr(result, kind, getattr(result, kind) + 1)
            result.problems.extend(problems[: _KEPT - len(result.problems)])

    def work() -> None:
        while is_one_left():
            try:
                problems = check(pool.run(inputs, retries=retries))
            except PoolClosedError:
                return  # whoever closed it wants no more
            except Exception as error:  # noqa: BLE001 - whatever it is, the request has failed
                note("failed", [f"{type(error).__name__}: {error}"])
                continue
            if problems:
                note("wrong", problems)

    # Daemons: an interrupt ends the program, and not only the wait for them.
    threads = [threading.Thread(target=work, name=f"client-{n}", daemon=True) for n in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.elapsed_s = time.perf_counter() - started
    return result
