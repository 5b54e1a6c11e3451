"""Many requests from many threads, each answer checked: does a pool serve, and how fast?"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ortprep.bundle.loader_config import Golden, LoaderConfig, golden_of, read_loader_config
from ortprep.errors import PipelineError, PoolError
from ortprep.runtime.loading.buckets import choose_bucket
from ortprep.runtime.loading.golden import RecordedOutput, find_problems, read_golden
from ortprep.runtime.loading.variant_selection import FASTEST
from ortprep.runtime.pool.config import PoolConfig
from ortprep.runtime.pool.report import PoolStats, WorkerEvent
from ortprep.runtime.pool.session_pool import SessionPool
from ortprep.runtime.tensors.element_types import Array

_KEPT = 10

Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class GoldenCase:
    """Inputs, and the expected answer.

    Attributes:
        golden: Sample with the tolerances.
        inputs: Arrays by input name.
        expected: Recorded outputs, by name.
    """

    golden: Golden
    inputs: Tensors
    expected: Mapping[str, RecordedOutput]

    def find_problems(self, got: Tensors) -> list[str]:
        """Returns what is wrong with an answer."""
        return list(find_problems(self.golden, self.expected, got))


@dataclass
class LoadTestResult:
    """Result of many requests.

    Attributes:
        requests: Number of requests.
        elapsed_s: Time from the first call to the last answer, in seconds.
        wrong: Number of wrong answers.
        failed: Number of failed requests.
        problems: Problems of the first wrong answers and failed requests.
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


def load_test_bundle(
    bundle: Path,
    *,
    devices: str | Sequence[str],
    workers_per_device: int,
    requests: int,
    clients: int,
    observer: Callable[[WorkerEvent], None],
    precision: str = FASTEST,
) -> tuple[LoadTestResult, PoolStats]:
    """Makes a pool of a bundle, sends it the golden samples, and returns the result.

    Raises:
        PipelineError: A `SessionPool` cannot be made, or the samples cannot be read.
        PoolError: Workers took different variants.
    """
    config = PoolConfig(
        devices=devices, workers_per_device=workers_per_device, precision=precision, observer=observer
    )
    with SessionPool(bundle, config) as pool:
        cases = read_golden_cases(_served_variants(read_loader_config(bundle), pool.stats()), bundle)
        result = run_cases(pool, cases, requests=requests, clients=clients)
        return result, pool.stats()


def _served_variants(config: LoaderConfig, stats: PoolStats) -> LoaderConfig:
    """Returns the bundle with the variants that all workers have, the one for all shapes first.

    Raises:
        PoolError: Workers have different ones: which of them answers a request is not known.
    """
    (model,) = {name for worker in stats.workers for name in worker.models}
    taken = {(worker.variants[model], *worker.buckets.get(model, ())) for worker in stats.workers}
    if len(taken) > 1:
        raise PoolError(
            f"workers took different variants: {'; '.join(', '.join(names) for names in sorted(taken))}\n"
            "  expected the same for all, since their answers are compared with what it recorded",
            hint="name devices of one kind, or a precision",
        )
    by_name = {variant.name: variant for variant in config.variants}
    return config._replace(variants=tuple(by_name[name] for name in next(iter(taken))))


def read_golden_cases(served: LoaderConfig, root: Path) -> tuple[GoldenCase, ...]:
    """Returns the golden samples of the variants that answer them.

    Args:
        served: The bundle with the variants of a worker: the one for all shapes first, then its buckets.
        root: The bundle's folder.

    Raises:
        BundleError: A sample cannot be read.
    """
    cases, general = [], served.variants[0]
    for variant in served.variants:
        golden = golden_of(served, variant)
        inputs, expected = read_golden(golden, root)
        shapes = {name: array.shape for name, array in inputs.items()}
        if (choose_bucket(served, general, shapes=shapes) or general) == variant:
            cases.append(GoldenCase(golden, inputs, expected))
    return tuple(cases)


def run_cases(
    pool: SessionPool, cases: Sequence[GoldenCase], *, requests: int, clients: int
) -> LoadTestResult:
    """Makes a number of requests from several threads."""
    result, lock = LoadTestResult(requests), threading.Lock()
    turns = itertools.islice(itertools.cycle(cases), requests)

    def next_case() -> GoldenCase | None:
        with lock:
            return next(turns, None)

    def count_failure(kind: str, problems: list[str]) -> None:
        with lock:
            setattr(result, kind, getattr(result, kind) + 1)
            result.problems.extend(problems[: _KEPT - len(result.problems)])

    # What a worker says may have any class of ours: all but an answer is a failure.
    def work() -> None:
        while (case := next_case()) is not None:
            try:
                problems = case.find_problems(pool.run(case.inputs, retries=0))
            except PipelineError as error:
                count_failure("failed", [f"{type(error).__name__}: {error}"])
                continue
            if problems:
                count_failure("wrong", problems)

    # Daemons: an interrupt ends the program, and not only the wait for them.
    threads = [threading.Thread(target=work, name=f"client-{n}", daemon=True) for n in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.elapsed_s = time.perf_counter() - started
    return result
