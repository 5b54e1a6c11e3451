"""What a node's process does beside its job: its niceness, and the folder that it works in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ortprep.build.receipts import RECEIPT_VERSION, TaskReceipt
from ortprep.cluster.building.job import BuildJob, ShippedSpec, working_folder
from ortprep.errors import CacheError

SPEC = ShippedSpec({"name": "net"}, "net.yaml", ".", ())
SOURCE = TaskReceipt(RECEIPT_VERSION, "fetch", {}, (), {}, "2026-01-01T00:00:00+00:00", 1.0)
JOB = BuildJob(SPEC, SOURCE, "farm", "cpu", "file:///store", "file:///registry")

CHILD = """
import logging, os
logging.basicConfig(format="%(message)s")
from ortprep.cluster.building.job import reset_niceness
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
def test_what_is_measured_runs_as_jobs_do_not_as_ray_s_workers():
    assert run(drop=False).stdout == "0\n"


def test_who_may_not_take_the_niceness_back_is_warned():
    ended = run(drop=os.getuid() == 0)
    assert int(ended.stdout) >= 5
    assert "start Ray with RAY_worker_niceness=0" in ended.stderr


@pytest.mark.attack
def test_nothing_is_removed_behind_a_link_in_the_place_of_the_folder(tmp_path, monkeypatch):
    cache, precious = tmp_path / "cache", tmp_path / "mine" / "precious"
    precious.mkdir(parents=True)
    os.utime(precious, (0, 0))
    cache.mkdir()
    (cache / "cluster").symlink_to(precious.parent)
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(cache))
    with pytest.raises(CacheError, match="not safe to use"), working_folder(JOB):
        pass
    assert precious.exists()
