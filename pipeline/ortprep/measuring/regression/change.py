"""One figure in two bundles: worse or better, beyond a limit and the noise. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ortprep.bundle.tuning_record import Summary
from ortprep.measuring.comparison import MIN_ROUNDS
from ortprep.measuring.regression.limits import FIGURES, VERIFICATION, RegressionLimits

Verdict: TypeAlias = Literal["regression", "improvement", "noise", "same", "missing", "new", "incomparable"]
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
        limit: How much worse it may be, as a share; None for no limit.
    """

    figure: str
    cache: str
    old: Summary | None
    new: Summary | None
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
        if self.figure == VERIFICATION and self.new and _is_beyond(self.new.median):
            return f"{text}; expected at most 1"
        if self.ratio is None or self.limit is None:
            return text
        return f"{text}, {self.ratio:.3f}×; expected at most {1 + self.limit:.3f}×"


def format_value(value: float) -> str:
    """Returns a figure for people: four digits, and all of those before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def is_apart(below: Summary, above: Summary) -> bool:
    """Says whether one figure is smaller than another beyond the noise of both.

    The quartile ranges do not overlap; with two processes only, the whole ranges do not. A single process
    says nothing. The two were not measured in the same rounds, so there are no pairs.

    Of two equal plans one is called more than 10 % slower than the other in 1.9 % of comparisons at 3 rounds,
    0.4 % at 5 and 0.1 % at 7 (by ranges, 2.5 % at 2) where single processes scatter by 5 %, and in 11, 5 and
    2 % (12 % at 2) where they scatter by 10 % (20,000 random trials each).
    """
    rounds = min(below.count, above.count)
    if rounds < MIN_ROUNDS:
        return rounds > 1 and below.maximum < above.minimum
    return below.p75 < above.p25


def judge(old: Summary, new: Summary, *, limit: float | None, is_exact: bool = False) -> Verdict:
    """Returns the verdict on a figure where less is better.

    It is a regression if the ratio of medians exceeds `limit`, a share, and the two are apart beyond the
    noise; an improvement the other way round; noise if only the limit is exceeded. `is_exact` figures were
    counted and have no noise.
    """
    if limit is None:
        return "same"
    if new.median > old.median * (1 + limit):
        return "regression" if is_exact or is_apart(old, new) else "noise"
    if old.median > new.median * (1 + limit):
        return "improvement" if is_exact or is_apart(new, old) else "noise"
    return "same"


def measured_change(
    figure: str,
    cache: str,
    old: Summary | None,
    new: Summary | None,
    limits: RegressionLimits,
    *,
    is_comparable: bool,
) -> Change:
    """Returns the change of a measured figure, if both were measured under the same conditions."""
    limit = limits.limit_of(figure)
    if old is None or new is None:
        return Change(figure, cache, old, new, None, limit, "new" if old is None else "missing")
    verdict = judge(old, new, limit=limit) if is_comparable else "incomparable"
    return Change(figure, cache, old, new, _ratio(old.median, new.median), limit, verdict)


def size_change(old_bytes: int | None, new_bytes: int | None, limits: RegressionLimits) -> Change:
    """Returns the change of the size of a variant's files."""
    old, new = (None if size is None else _exactly(size / 2**20) for size in (old_bytes, new_bytes))
    limit = limits.limit_of("size")
    if old is None or new is None:
        return Change("size", "", old, new, None, limit, "new" if old is None else "missing")
    verdict = judge(old, new, limit=limit, is_exact=True)
    return Change("size", "", old, new, _ratio(old.median, new.median), limit, verdict)


def verification_change(old: float | None, new: float | None, limits: RegressionLimits) -> Change:
    """Returns the change of the largest error of any output, in units of its tolerance.

    Beyond its tolerance it is a regression unless it was so before; within, only if a limit was set.
    """
    limit = limits.limit_of(VERIFICATION)
    was, now = (None if error is None else _exactly(error) for error in (old, new))
    ratio = None if old is None or new is None else _ratio(old, new)
    return Change(VERIFICATION, "", was, now, ratio, limit, _judge_errors(old, new, limit))


def _judge_errors(old: float | None, new: float | None, limit: float | None) -> Verdict:
    if new is None:
        return "missing"
    if _is_beyond(new) and not (old is not None and _is_beyond(old)):
        return "regression"
    if old is None:
        return "new"
    if _is_beyond(old) and not _is_beyond(new):
        return "improvement"
    return judge(_exactly(old), _exactly(new), limit=limit, is_exact=True)


def _is_beyond(error: float) -> bool:
    return not error <= 1  # so is what is no number


def _exactly(value: float) -> Summary:
    return Summary(value, value, value, value, value, 1)


def _ratio(old: float, new: float) -> float:
    if old == new:
        return 1.0
    return new / old if old else math.inf
