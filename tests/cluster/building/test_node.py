"""What a node's process does beside its job."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHILD = """
import logging, os
logging.basicConfig(format="%(message)s")
from ortprep.cluster.building.node import reset_niceness
os.nice(5)
if {drop}:
    os.setuid(65534)
reset_niceness()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def run(*, drop: bool) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", CHILD.format(drop=drop)]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=600)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may take niceness back")
def test_what_is_measured_runs_as_jobs_do_not_as_ray_s_workers() -> None:
    assert run(drop=False).stdout == "0\n"


def test_who_may_not_take_the_niceness_back_is_warned() -> None:
    ended = run(drop=os.getuid() == 0)
    assert int(ended.stdout) >= 5
    assert "start Ray with RAY_worker_niceness=0" in ended.stderr
