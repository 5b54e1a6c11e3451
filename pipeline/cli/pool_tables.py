"""Pools as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from pipeline.runtime.pool.crew import PoolStats, WorkerStats
from pipeline.runtime.pool.driving import Drive
from pipeline.runtime.pool.placement import ModelLoad, Placement

_MB = 2**20


def build_placement_table(loads: Sequence[ModelLoad], placement: Placement) -> Table:
    """Returns one row per device: its models, the work of a round, and the memory they take."""
    costs = {load.name: load.cost_ms for load in loads}
    table = Table(title=f"a round of one request per model takes at least {placement.makespan_ms:.3g} ms")
    table.add_column("device")
    table.add_column("models")
    for heading in ("ms a round", "memory MB"):
        table.add_column(heading, justify="right")
    for assignment in placement.assignments:
        models = ", ".join(f"{name} ({costs[name]:.3g} ms)" for name in assignment.models)
        memory = f"{assignment.memory_bytes / _MB:.0f}"
        table.add_row(assignment.device, models or "–", f"{assignment.cost_ms:.3g}", memory)
    return table


def build_workers_table(stats: PoolStats) -> Table:
    """Returns one row per worker: what it took to start and what it has served."""
    table = Table(title="workers")
    for heading in ("worker", "state", "variant"):
        table.add_column(heading)
    for heading in ("pid", "ready after s", "private MB", "served", "p50 ms", "p99 ms", "restarts"):
        table.add_column(heading, justify="right")
    for worker in stats.workers:
        table.add_row(*_worker_row(worker))
    return table


def _worker_row(worker: WorkerStats) -> tuple[str, ...]:
    private_mb = None if worker.private_bytes is None else worker.private_bytes / _MB
    return (
        worker.name,
        worker.state,
        ", ".join(_variants(worker)) or "–",
        "–" if worker.pid is None else str(worker.pid),
        _figure(worker.start_s),
        _figure(private_mb),
        str(worker.served),
        _figure(worker.p50_ms),
        _figure(worker.p99_ms),
        str(worker.restarts),
    )


def _variants(worker: WorkerStats) -> Iterator[str]:
    for model, variant in worker.variants.items():
        buckets = len(worker.buckets.get(model, ()))
        yield f"{variant} and {buckets} bucket{'s' if buckets > 1 else ''}" if buckets else variant


def describe_drive(result: Drive) -> Iterator[str]:
    """Yields the lines that say what came of many requests."""
    yield (
        f"{result.requests} requests in {result.elapsed_s:.2f} s: {result.per_second:.0f} a second, "
        f"{result.wrong} answered wrongly, {result.failed} failed"
    )
    for problem in result.problems:
        yield f"  {problem}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
