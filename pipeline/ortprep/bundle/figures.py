"""Costs of loading a model, as a manifest records them: raw samples, summarised where they are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import quantiles

from ortprep.errors import BundleError


@dataclass(frozen=True)
class Samples:
    """One figure of fresh processes, in the order of the rounds; the unit is in the field that holds it.

    Attributes:
        values: One per process; at least one.

    Raises:
        BundleError: There are none.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise BundleError("a figure without samples\n  expected one per process")

    @classmethod
    def of(cls, values: Iterable[float]) -> Samples:
        """Returns values as samples."""
        return cls(tuple(values))

    @cached_property
    def _quartiles(self) -> tuple[float, float, float]:
        """Quartiles, interpolated between neighbours."""
        if len(self.values) == 1:
            return (self.values[0],) * 3
        low, middle, high = quantiles(self.values, n=4, method="inclusive")
        return low, middle, high

    @property
    def p25(self) -> float:
        """The lower quartile."""
        return self._quartiles[0]

    @property
    def median(self) -> float:
        """The median."""
        return self._quartiles[1]

    @property
    def p75(self) -> float:
        """The upper quartile."""
        return self._quartiles[2]

    @property
    def minimum(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def maximum(self) -> float:
        """The largest value."""
        return max(self.values)

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self.values)

    def statistics(self) -> dict[str, float]:
        """Returns the order statistics by their names."""
        return {name: getattr(self, name) for name in ("median", "p25", "p75", "minimum", "maximum", "count")}


@dataclass(frozen=True)
class PlanFigures:
    """Costs of one way of loading a model, over fresh processes.

    Attributes:
        plan: `default`, `prepared`, `portable`, `forked`, …; `trial N` in a search.
        ready_ms: From the start of the process to its first result.
        init_ms: Making the session.
        first_ms: First run, primary shape.
        steady_ms: A later run: median of a process's runs; in a search, weighted over the declared shapes.
        private_mb: Anonymous memory after the runs, in MB of 2**20 bytes.
        peak_mb: Largest resident set, in MB of 2**20 bytes.
        gpu_mb: GPU memory in use by the process, None without GPU.
        cost_ratio: Cost of a job relative to the default's in the same rounds; None outside a search.
    """

    plan: str
    ready_ms: Samples
    init_ms: Samples
    first_ms: Samples
    steady_ms: Samples
    private_mb: Samples
    peak_mb: Samples
    gpu_mb: Samples | None = None
    cost_ratio: Samples | None = None

    @property
    def first_result_ms(self) -> Samples:
        """Session and first run together."""
        pairs = zip(self.init_ms.values, self.first_ms.values, strict=False)
        return Samples.of(init_ms + first_ms for init_ms, first_ms in pairs)

    @property
    def cost(self) -> float:
        """Median cost of a job relative to the default's; 1 where it was not compared."""
        return 1.0 if self.cost_ratio is None else self.cost_ratio.median
