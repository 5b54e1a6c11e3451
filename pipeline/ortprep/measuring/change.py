"""One figure in two bundles: worse or better, beyond a limit and the noise. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ortprep.bundle.figures import Samples
from ortprep.errors import SpecError
from ortprep.measuring.comparison import is_apart

DEFAULT_LIMIT = 0.10

VERIFICATION = "verification"

MEASURED: Mapping[str, str] = {
    "ready": "ready_ms",
    "init": "init_ms",
    "first-run": "first_ms",
    "first-result": "first_result_ms",
    "steady": "steady_ms",
    "private": "private_mb",
    "peak": "peak_mb",
    "gpu": "gpu_mb",
}
"""Field of a plan's figures, by the name of the figure for users."""

FIGURES: Mapping[str, str] = {
    **{name: "ms" if field.endswith("_ms") else "MB" for name, field in MEASURED.items()},
    "size": "MB",
    VERIFICATION: "× tolerance",
}
"""Every figure that is compared, as users name it, and its unit; MB are 2**20 bytes. Less is better."""

_EVERY = ""
_LIMIT = re.compile(r"(?:(?P<figure>[^=]+)=)?(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?P<percent>%?)")


@dataclass(frozen=True)
class RegressionLimits:
    """Limits of how much worse a figure may become, as a share of what it was.

    Attributes:
        by_figure: Limits of single figures, by their names in `FIGURES`.
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
    found: dict[str, float] = {}
    for text in texts:
        match = _LIMIT.fullmatch(text.strip())
        # A bare 10 is refused: who writes it means 10 %, and would get 1,000 %.
        if match is None or len(text) > 100 or (not match["percent"] and float(match["number"]) >= 1):
            raise SpecError(
                f"not a limit: {text[:100]!r}\n"
                "  expected a percentage or a share below 1: 10%, 0.1, init=20%",
                hint="ortprep compare OLD NEW --fail-over 10%",
            )
        figure = match["figure"] or _EVERY
        if figure not in (_EVERY, *FIGURES):
            raise SpecError(f"no such figure: {figure!r}\n  expected one of {', '.join(FIGURES)}")
        found[figure] = float(match["number"]) / (100 if match["percent"] else 1)
    return RegressionLimits(found.pop(_EVERY, DEFAULT_LIMIT), found)


Verdict: TypeAlias = Literal[
    "regression", "improvement", "within the noise", "within the limit", "missing", "new", "not comparable"
]
"""Beyond the limit and the noise, worse or better; beyond the limit, within the noise; within the limit; not
known any more; not known before; measured on other hardware or with other inputs.
"""


@dataclass(frozen=True)
class Change:
    """One figure of a variant in both bundles.

    Attributes:
        figure: Its name in `FIGURES`.
        cache: `warm` or `cold`; "" for what was not measured but counted.
        old: None if not known, as `new`.
        ratio: New to old, by their medians; None where one is missing.
        limit: Maximum increase, as a share; None for no limit.
    """

    figure: str
    cache: str
    old: Samples | None
    new: Samples | None
    ratio: float | None
    limit: float | None
    verdict: Verdict

    def __str__(self) -> str:
        """Says what is wrong with it, as the reason of a failure."""
        unit = FIGURES[self.figure]
        old, new = (
            f"{format_value(one.median)} {unit}" if one else "nothing" for one in (self.old, self.new)
        )
        text = f"{self.figure}{f', {self.cache} cache' if self.cache else ''}: {new} instead of {old}"
        if self.figure == VERIFICATION and _is_beyond(self.new):
            return f"{text}; expected at most 1"
        if self.ratio is None or self.limit is None:
            return text
        return f"{text}, {self.ratio:.3f}×; expected at most {1 + self.limit:.3f}×"


def format_value(value: float) -> str:
    """Returns a figure for people: four digits, and all of those before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def compare_figure(
    figure: str,
    old: Samples | None,
    new: Samples | None,
    limits: RegressionLimits,
    *,
    cache: str = "",
    is_comparable: bool = True,
) -> Change:
    """Returns the change of a figure between two bundles.

    Verification beyond its tolerance is a regression unless it was so before.

    Args:
        figure: Its name in `FIGURES`.
        old: Its former samples, None if not known.
        new: Its present samples, None if not known.
        limits: Limits of its increase.
        cache: The page cache that it was measured with; "" for what was counted, which has no noise.
        is_comparable: Whether both were measured under the same conditions.
    """
    limit = limits.limit_of(figure)
    ratio = None
    if old is not None and new is not None:
        ratio = 1.0 if old.median == new.median else new.median / old.median if old.median else math.inf
    verdict: Verdict
    if new is None:
        verdict = "missing"
    elif figure == VERIFICATION and _is_beyond(new) != _is_beyond(old):
        verdict = "regression" if _is_beyond(new) else "improvement"
    elif old is None:
        verdict = "new"
    elif not is_comparable:
        verdict = "not comparable"
    else:
        verdict = judge(old, new, limit=limit, is_counted=not cache)
    return Change(figure, cache, old, new, ratio, limit, verdict)


def judge(old: Samples, new: Samples, *, limit: float | None, is_counted: bool = False) -> Verdict:
    """Returns the verdict on a figure where less is better.

    It is a regression if the ratio of medians exceeds `limit`, a share, and the two are apart beyond the
    noise; an improvement the other way round; noise if only the limit is exceeded. `is_counted` figures have
    no noise.
    """
    if limit is None:
        return "within the limit"
    if new.median > old.median * (1 + limit):
        return "regression" if is_counted or is_apart(old, new) else "within the noise"
    if old.median > new.median * (1 + limit):
        return "improvement" if is_counted or is_apart(new, old) else "within the noise"
    return "within the limit"


def _is_beyond(error: Samples | None) -> bool:
    return error is not None and not error.median <= 1  # so is what is no number
