"""How much worse each figure may become: `10%`, `0.1`, `init=20%`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ortprep.errors import SpecError

DEFAULT_LIMIT = 0.10

VERIFICATION = "verification"

FIGURES: Mapping[str, str] = {
    "ready": "ms",
    "init": "ms",
    "first-run": "ms",
    "first-result": "ms",
    "steady": "ms",
    "private": "MB",
    "peak": "MB",
    "gpu": "MB",
    "size": "MB",
    VERIFICATION: "× tolerance",
}
"""Every figure that is compared, as users name it, and its unit; MB are 2**20 bytes. Less is better."""

_LIMIT = re.compile(r"(?:(?P<figure>[^=]*)=)?(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?P<percent>%?)")


@dataclass(frozen=True)
class RegressionLimits:
    """How much worse a figure may become, as a share of what it was.

    Attributes:
        by_figure: Of those that have one, by their names in `FIGURES`.
    """

    share: float = DEFAULT_LIMIT
    by_figure: Mapping[str, float] = field(default_factory=dict)

    def limit_of(self, figure: str) -> float | None:
        """Returns the limit of a figure, None for none: a verification has its tolerance already."""
        return self.by_figure.get(figure, None if figure == VERIFICATION else self.share)


def parse_limits(texts: Sequence[str]) -> RegressionLimits:
    """Returns the limits that a user gave; the last one for the same figure counts.

    Args:
        texts: Each `10%` or `0.1`, for all figures, or `init=20%` for one of them.

    Raises:
        SpecError: One is none of these, or names no figure.
    """
    share = DEFAULT_LIMIT
    by_figure: dict[str, float] = {}
    for text in texts:
        figure, limit = _parse_limit(text)
        if figure is None:
            share = limit
        else:
            by_figure[figure] = limit
    return RegressionLimits(share, by_figure)


def _parse_limit(text: str) -> tuple[str | None, float]:
    match = _LIMIT.fullmatch(text.strip())
    # A bare 10 is refused: who writes it means 10 %, and would get 1,000 %.
    if match is None or len(text) > 100 or (not match["percent"] and float(match["number"]) >= 1):
        raise SpecError(
            f"not a limit: {text[:100]!r}\n  expected a percentage or a share below 1: 10%, 0.1, init=20%",
            hint="ortprep compare OLD NEW --fail-over 10%",
        )
    figure: str | None = match["figure"]
    if figure is not None and figure not in FIGURES:
        raise SpecError(
            f"no such figure: {figure!r}\n  expected one of {', '.join(FIGURES)}",
            hint="ortprep compare OLD NEW --fail-over 10% --fail-over init=20%",
        )
    return figure, float(match["number"]) / (100 if match["percent"] else 1)
