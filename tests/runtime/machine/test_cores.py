"""Threads that fit the share: cores that the process may use, divided by the workers that share them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from ortprep.bundle.loader_config import read_loader_config
from ortprep.errors import LoadError
from ortprep.runtime import PoolConfig, load
from ortprep.runtime.loading import opened_bundle
from ortprep.runtime.machine import cores
from ortprep.runtime.machine.cores import find_thread_limit, usable_cores
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.pool.config import plan_workers
from tests.runtime.builders import write_bundle

pytestmark = pytest.mark.runtime

V1 = "4:cpu,cpuacct:/pods/job\n9:memory:/pods/job\n"
V1_FOLDER = "sys/fs/cgroup/cpu,cpuacct"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    read_hardware()  # remembered by the process, so before it looks different
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in cores.WORKER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def machine(root: Path, files: Mapping[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return str(root)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
                "sys/fs/cgroup/a/b/x": "",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8),
        (
            {
                "proc/self/cgroup": V1,
                f"{V1_FOLDER}/pods/job/cpu.cfs_quota_us": "-1\n",
                f"{V1_FOLDER}/pods/job/cpu.cfs_period_us": "100000\n",
                f"{V1_FOLDER}/pods/cpu.cfs_quota_us": "250000\n",
                f"{V1_FOLDER}/pods/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        # A container sees its own group as the root of the mount.
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/0123\n0::/\n",
                f"{V1_FOLDER}/cpu.cfs_quota_us": "100000\n",
                f"{V1_FOLDER}/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "nonsense\n:::\n0::/../..\n", "sys/fs/cgroup/cpu.max": "\n"}, 8),
    ],
)
def test_usable_cores_are_those_of_the_strictest_limit(tmp_path, files, expected):
    assert usable_cores(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WEB_CONCURRENCY": "1"}, None),
        ({"WEB_CONCURRENCY": "4"}, 2),
        ({"WEB_CONCURRENCY": "100"}, 1),
        ({"WEB_CONCURRENCY": "4", "ORTPREP_WORKERS": "2"}, 4),
        ({"WEB_CONCURRENCY": "4", "ORTPREP_WORKERS": "1"}, None),
        *(({"ORTPREP_WORKERS": text}, None) for text in ("", "0", "-2", "two", "9" * 99)),
    ],
)
def test_workers_share_the_cores(tmp_path, environment, expected):
    limit = find_thread_limit(environment, str(tmp_path))
    assert (None if limit is None else limit[0]) == expected


@pytest.mark.parametrize(("workers", "expected"), [(1, None), (2, 4), (3, 2), (8, 1), (100, 1)])
def test_a_number_of_workers_that_is_passed_wins(tmp_path, workers, expected):
    limit = find_thread_limit({"ORTPREP_WORKERS": "5"}, str(tmp_path), workers=workers)
    assert (None if limit is None else limit[0]) == expected


def test_a_process_with_fewer_cores_than_the_machine_gets_no_more_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert find_thread_limit({}, str(tmp_path)) == (8, "8 usable cores of 64")


def test_a_session_takes_its_share_unless_the_application_says_otherwise(tmp_path, monkeypatch):
    bundle = write_bundle(tmp_path / "b")

    def threads(workers: int | None = None, **own: int) -> int:
        session = load(bundle, session_options=own or None, workers=workers)
        return int(session.get_session_options().intra_op_num_threads)

    before = threads()
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    assert (before, threads(), threads(8), threads(1)) == (0, 2, 1, 0)
    assert (threads(intra_op_num_threads=3), threads(8, intra_op_num_threads=3)) == (3, 3)
    assert os.environ["WEB_CONCURRENCY"] == "4"


@pytest.mark.parametrize("workers", [0, -1, 2.5, True, "2"])
def test_what_is_no_number_of_workers_is_refused(tmp_path, workers):
    with pytest.raises(LoadError, match="bad argument of load: workers="):
        load(tmp_path, workers=workers)


@pytest.mark.parametrize(("count", "expected"), [(1, None), (2, 4), (16, 1)])
def test_workers_of_a_pool_share_the_cores(tmp_path, count, expected):
    bundle = write_bundle(tmp_path / "b")
    config = PoolConfig(devices="cpu", workers_per_device=count)
    workers, _ = plan_workers({"b": bundle}, {"b": read_loader_config(bundle)}, config)
    assert [worker.job.load.threads for worker in workers] == [expected] * count


def test_the_number_and_the_reason_are_logged_once(tmp_path, monkeypatch, caplog):
    bundle = write_bundle(tmp_path / "b")
    monkeypatch.setattr(opened_bundle, "_LOGGED", set())
    with caplog.at_level("INFO", logger="ortprep"):
        for _ in range(2):
            load(bundle, workers=2)
    said = [record.message for record in caplog.records if "threads per session" in record.message]
    assert said == [
        f"at most {usable_cores() // 2} threads per session: 8 usable cores for 2 workers (workers)"
    ]
