from __future__ import annotations

from ortprep.doctor.interleaved_runs import explain_failures
from ortprep.measuring.rounds import InterleavedRuns


def test_what_was_cut_is_said_with_its_figures() -> None:
    for done in (0, 1):
        runs = InterleavedRuns({"threads": ("A",)} if done else {}, {}, 4 * 3600)
        (finding,) = explain_failures(runs, "two models")
        assert "up to 240 minutes" in finding.text
        assert f"there were {done} instead of 3" in finding.text
