from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ortprep.doctor.environment.facts.records import DiskSpace
from ortprep.doctor.environment.rules.findings import find
from ortprep.runtime.machine.cgroups import ResourceLimits, read_limits
from tests.doctor.environment.builders import HEALTHY, codes

MEBIBYTE = 1024 * 1024


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    return root


GROUPS = {
    "proc/self/cgroup": "0::/pods/job\n",
    "sys/fs/cgroup/pods/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pods/job/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/pods/job/cpu.stat": "nr_periods 200\nnr_throttled 50\nthrottled_usec 2500000\n",
    "sys/fs/cgroup/pods/memory.max": "536870912\n",
    "sys/fs/cgroup/pods/job/memory.max": "max\n",
}


def test_limits_are_those_of_the_strictest_level(tmp_path: Path) -> None:
    limits = read_limits(_write(tmp_path, GROUPS))
    assert limits == ResourceLimits(1.5, 200, 50, 536_870_912)


def test_a_throttled_group_is_found(tmp_path: Path) -> None:
    limits = read_limits(_write(tmp_path, GROUPS))
    found = codes(find(replace(HEALTHY, limits=limits)))
    assert {"cpu-throttled", "cores-above-quota", "memory-limited"} <= found


def test_the_least_of_all_levels_counts(tmp_path: Path) -> None:
    files = {**GROUPS, "sys/fs/cgroup/pods/cpu.max": "50000 100000\n"}
    assert read_limits(_write(tmp_path, files)).quota_cores == 0.5


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {
            "proc/self/cgroup": "9:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        {"proc/self/cgroup": "nonsense\n:::\n0::/../../..\n", "sys/fs/cgroup/cpu.max": "\n"},
    ],
)
def test_no_limit_is_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert read_limits(_write(tmp_path, files)) == ResourceLimits()


def test_a_tiny_shared_memory_is_found() -> None:
    room = DiskSpace("/dev/shm", 64 * MEBIBYTE, 64 * MEBIBYTE)
    assert "small-shared-memory" in codes(find(replace(HEALTHY, shared_memory=room)))


def test_a_tiny_shared_memory_really_mounted_is_found(tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("nothing can be mounted here")
    program = (
        "import sys; from pathlib import Path;"
        "from ortprep.doctor.environment.check import diagnose_environment;"
        "diagnosis = diagnose_environment(artifacts=Path(sys.argv[1]));"
        "print(*(f.code for f in diagnosis.findings if f.severity == 'advice'))"
    )
    said = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", program, tmp_path],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "small-shared-memory" in said.split()


def test_limits_of_this_machine_are_read() -> None:
    limits = read_limits()
    assert limits.quota_cores is None or limits.quota_cores > 0
    assert limits.memory_bytes is None or limits.memory_bytes > 0
