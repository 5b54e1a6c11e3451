from __future__ import annotations

from ortprep.diagnose.interleaved_runs import explain_cut
from ortprep.measuring.rounds import InterleavedRuns


def test_what_was_cut_is_said_with_its_figures() -> None:
    assert "up to 240 minutes" in explain_cut(InterleavedRuns({}, {}, 4 * 3600)).text
    assert "there was 1 in place of 3" in explain_cut(InterleavedRuns({"a": ("A",)}, {}, 1800)).text
