"""Many requests from many threads, each answer checked: does a pool serve, and how fast?"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.bundle.loader_config import LoaderConfig, read_loader_config
from pipeline.errors import PoolClosedError
from pipeline.runtime.loading.variant_selection import FASTEST

if TYPE_CHECKING:
    from pipeline.runtime.pool.crew import PoolStats, WorkerEvent
    from pipeline.runtime.pool.questions import Question
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
    precision: str = FASTEST,
) -> tuple[Drive, PoolStats]:
    """Makes a pool of a bundle, drives it with its golden samples, and returns what came of it.

    Raises:
        PipelineError: As `SessionPool` does; or the samples cannot be read.
        PoolError: Workers took variants that have no golden sample in common.
    """
    from pipeline.runtime.pool.questions import read_questions
    from pipeline.runtime.pool.session_pool import SessionPool

    with SessionPool(
        bundle,
        devices=devices,
        workers_per_device=workers_per_device,
        precision=precision,
        observer=observer,
    ) as pool:
        served = _served_variants(read_loader_config(bundle), pool.stats())
        result = drive(pool, read_questions(served, bundle), requests=requests, clients=clients)
        return result, pool.stats()


def _served_variants(config: LoaderConfig, stats: PoolStats) -> list[LoaderConfig]:
    """Returns the bundle with the variants that workers have, once for all workers that have the same."""
    (model,) = {name for worker in stats.workers for name in worker.models}
    named = {(worker.variants[model], *worker.buckets.get(model, ())) for worker in stats.workers}
    by_name = {variant.name: variant for variant in config.variants}
    return [replace(config, variants=tuple(by_name[name] for name in names)) for names in sorted(named)]


def drive(
    pool: SessionPool, questions: Sequence[Question], *, requests: int, clients: int, retries: int = 0
) -> Drive:
    """Makes requests from several threads until so many are made.

    Args:
        pool: A pool of one model.
        questions: What requests bring, in turn.
        requests: How many.
        clients: How many threads.
        retries: Of each request.
    """
    result, lock = Drive(requests), threading.Lock()
    turns = itertools.islice(itertools.cycle(questions), requests)

    def next_question() -> Question | None:
        with lock:
            return next(turns, None)

    def note(kind: str, problems: list[str]) -> None:
        with lock:
            setattr(result, kind, getattr(result, kind) + 1)
            result.problems.extend(problems[: _KEPT - len(result.problems)])

    def work() -> None:
        while (question := next_question()) is not None:
            try:
                problems = question.find_problems(pool.run(question.inputs, retries=retries))
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
