"""Plans that are measured side by side, round by round. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ortprep.tuning.objective import Figures, Trial
from ortprep.tuning.space import PlanChoice


class BatchRun:
    """Figures of some plans and of the anchor, round by round."""

    def __init__(self, choices: Sequence[PlanChoice], anchor: PlanChoice) -> None:
        self._anchor = anchor
        self._figures: dict[PlanChoice, list[Figures]] = {choice: [] for choice in (*choices, anchor)}
        self._anchors: dict[PlanChoice, list[Figures]] = {choice: [] for choice in choices}
        self._failures: dict[PlanChoice, str] = {}
        self._elapsed_s: dict[PlanChoice, float] = {}

    def runs(self, choice: PlanChoice) -> bool:
        """Says whether a plan has not failed."""
        return choice not in self._failures

    def figures(self, choice: PlanChoice) -> tuple[Figures, ...]:
        """Returns what a plan was measured at, in the order of rounds."""
        return tuple(self._figures[choice])

    def spend(self, choice: PlanChoice, elapsed_s: float) -> None:
        """Adds seconds that a plan took."""
        self._elapsed_s[choice] = self._elapsed_s.get(choice, 0.0) + elapsed_s

    def add(self, choice: PlanChoice, result: Figures | str) -> None:
        """Adds a plan's figures of this round, or its failure."""
        if isinstance(result, str):
            self._failures.setdefault(choice, result)
        else:
            self._figures[choice].append(result)

    def close_round(self, choices: Sequence[PlanChoice]) -> None:
        """Pairs each figure with the anchor's of its round; where that failed, with its last good one."""
        for choice in choices:
            if len(self._figures[choice]) > len(self._anchors[choice]) and self._figures[self._anchor]:
                self._anchors[choice].append(self._figures[self._anchor][-1])

    def _anchor_share_s(self, choice: PlanChoice) -> float:
        """Returns a plan's share of the anchor's seconds."""
        others = [one for one in self._anchors if one != self._anchor]
        return self._elapsed_s.get(self._anchor, 0.0) / len(others) if choice in others else 0.0

    def trial(self, choice: PlanChoice, *, number: int, kind: str) -> Trial:
        """Returns the trial of a plan so far."""
        count = min(len(self._figures[choice]), len(self._anchors[choice]))
        failure = self._failures.get(choice)
        if failure is None and self._figures[choice] and not count:
            failure = f"nothing to compare with: {self._failures.get(self._anchor)}"
        return Trial(
            number=number,
            kind=kind,
            choice=choice,
            figures=tuple(self._figures[choice][:count]),
            anchors=tuple(self._anchors[choice][:count]),
            failure=failure,
            elapsed_s=self._elapsed_s.get(choice, 0.0) + self._anchor_share_s(choice),
        )
