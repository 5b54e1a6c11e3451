"""Order statistics, as records have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Order statistics of one figure over fresh processes; the unit is in the field that holds it."""

    median: float
    p25: float
    p75: float
    minimum: float
    maximum: float
    count: int
