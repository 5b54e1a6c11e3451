"""Many requests from many threads, each answer checked: does a pool serve, and how fast?"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ortprep.bundle.loader_config import Golden, LoaderConfig, Variant, golden_of, read_loader_config
from ortprep.errors import PipelineError, PoolClosedError, PoolError
from ortprep.runtime.loading.bucket_selection import choose_bucket
from ortprep.runtime.loading.variant_selection import FASTEST
from ortprep.runtime.pool.config import PoolConfig
from ortprep.runtime.pool.session_pool import SessionPool
from ortprep.runtime.pool.stats import PoolStats, WorkerEvent
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.verification.golden import RecordedOutput, find_problems, read_golden

_KEPT = 10

Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class GoldenSample:
    """A golden sample.

    Attributes:
        golden: Its tolerances.
        inputs: By name.
        expected: What was recorded of the outputs, by name.
    """

    golden: Golden
    inputs: Tensors
    expected: Mapping[str, RecordedOutput]


@dataclass(frozen=True)
class GoldenCase:
    """Inputs, and what may be answered.

    Attributes:
        inputs: By name.
        samples: What was recorded for them, of each variant that may answer.
    """

    inputs: Tensors
    samples: tuple[GoldenSample, ...]

    def find_problems(self, got: Tensors) -> list[str]:
        """Returns what is wrong with an answer, by the sample that it is nearest to."""
        return min((find_problems(one.golden, one.expected, got) for one in self.samples), key=len)


@dataclass
class LoadTestResult:
    """Result of many requests.

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
        PipelineError: As `SessionPool` does; or the samples cannot be read.
        PoolError: Workers took variants that have no golden sample in common.
    """
    config = PoolConfig(
        devices=devices, workers_per_device=workers_per_device, precision=precision, observer=observer
    )
    with SessionPool(bundle, config) as pool:
        served = _served_variants(read_loader_config(bundle), pool.stats())
        result = run_cases(pool, read_golden_cases(served, bundle), requests=requests, clients=clients)
        return result, pool.stats()


def _served_variants(config: LoaderConfig, stats: PoolStats) -> list[LoaderConfig]:
    """Returns the bundle with the variants that workers have, once for all workers that have the same."""
    (model,) = {name for worker in stats.workers for name in worker.models}
    named = {(worker.variants[model], *worker.buckets.get(model, ())) for worker in stats.workers}
    by_name = {variant.name: variant for variant in config.variants}
    return [replace(config, variants=tuple(by_name[name] for name in names)) for names in sorted(named)]


def read_golden_cases(served: Sequence[LoaderConfig], root: Path) -> tuple[GoldenCase, ...]:
    """Returns the golden samples that workers can be asked.

    Which worker answers is not known. So where workers have different variants, a sample is asked only if
    each variant that may answer has recorded what it answers to the same inputs.

    Args:
        served: What workers have: the bundle with the variant for all shapes first, then their buckets.
        root: The bundle's folder.

    Raises:
        PoolError: There is no such sample.
        BundleError: A sample cannot be read.
    """
    samples = {
        variant.name: _read_sample(config, variant, root) for config in served for variant in config.variants
    }
    cases: dict[tuple[str, ...], GoldenCase] = {}
    for sample in samples.values():
        names = tuple(dict.fromkeys(_answering(config, sample.inputs).name for config in served))
        answering = tuple(samples[name] for name in names)
        if all(_are_same(one.inputs, sample.inputs) for one in answering):
            cases.setdefault(names, GoldenCase(sample.inputs, answering))
    if not cases:
        variants = ", ".join(config.variants[0].name for config in served)
        raise PoolError(
            f"no golden sample to check answers with: {root}\n"
            f"  expected one with the same inputs for all of {variants}, which workers took",
            hint="name devices of one kind, or a precision",
        )
    return tuple(cases.values())


def _read_sample(config: LoaderConfig, variant: Variant, root: Path) -> GoldenSample:
    golden = golden_of(config, variant)
    return GoldenSample(golden, *read_golden(golden, root))


def _answering(config: LoaderConfig, inputs: Tensors) -> Variant:
    general = config.variants[0]
    shapes = {name: array.shape for name, array in inputs.items()}
    return choose_bucket(config, general, shapes=shapes) or general


def _are_same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        (array.dtype, array.shape) == (right[name].dtype, right[name].shape)
        and array.tobytes() == right[name].tobytes()
        for name, array in left.items()
    )


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

    def work() -> None:
        while (case := next_case()) is not None:
            try:
                problems = case.find_problems(pool.run(case.inputs, retries=0))
            except PoolClosedError:
                return  # the pool's owner ended the test
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
