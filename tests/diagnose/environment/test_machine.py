from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ortprep.diagnose.environment.facts.cgroups import read_limits
from ortprep.diagnose.environment.facts.machine import read_disk_space
from ortprep.diagnose.environment.facts.records import ResourceLimits
from ortprep.diagnose.environment.rules.findings import find
from ortprep.runtime.machine.hardware import read_hardware
from tests.diagnose.environment.builders import HEALTHY, codes

MEBIBYTE = 1024 * 1024
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
HARDWARE = read_hardware()
UNLIMITED = ResourceLimits(HARDWARE.cores, None, 0, 0, 0.0, HARDWARE.memory_bytes, None)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    return root


SECOND = {
    "proc/self/cgroup": "0::/pods/job\n",
    "sys/fs/cgroup/pods/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pods/job/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/pods/job/cpu.stat": "nr_periods 200\nnr_throttled 50\nthrottled_usec 2500000\n",
    "sys/fs/cgroup/pods/memory.max": "536870912\n",
    "sys/fs/cgroup/pods/job/memory.max": "max\n",
}
FIRST = {
    "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
    # As a container sees it: its own group, mounted as the root.
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 200\nnr_throttled 50\nthrottled_time 2500000000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "536870912\n",
}


@pytest.mark.parametrize("files", [SECOND, FIRST], ids=["version 2", "version 1"])
def test_both_versions_of_control_groups_say_the_same(tmp_path: Path, files: dict[str, str]) -> None:
    limits = read_limits(HARDWARE, _write(tmp_path, files))
    assert limits == replace(
        UNLIMITED,
        quota_cores=1.5,
        periods=200,
        throttled_periods=50,
        throttled_s=2.5,
        memory_limit_bytes=536_870_912,
    )


@pytest.mark.parametrize("files", [SECOND, FIRST], ids=["version 2", "version 1"])
def test_a_throttled_group_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    limits = replace(read_limits(HARDWARE, _write(tmp_path, files)), cores=8)
    assert {"cpu-throttled", "cores-above-quota", "memory-limited"} <= codes(
        find(replace(HEALTHY, limits=limits))
    )


def test_the_least_of_all_levels_counts(tmp_path: Path) -> None:
    files = {**SECOND, "sys/fs/cgroup/pods/cpu.max": "50000 100000\n"}
    assert read_limits(HARDWARE, _write(tmp_path, files)).quota_cores == 0.5


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        {"proc/self/cgroup": "nonsense\n:::\n0::/../../..\n", "sys/fs/cgroup/cpu.max": "\n"},
    ],
)
def test_no_limit_is_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert read_limits(HARDWARE, _write(tmp_path, files)) == UNLIMITED


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that grants a tenth of a core, where one can be made."""
    folder = CPU_GROUPS / f"ortprep-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (folder / "cpu.cfs_period_us").write_text("20000", encoding="ascii")
        (folder / "cpu.cfs_quota_us").write_text("2000", encoding="ascii")
        yield folder
    finally:
        folder.rmdir()


def test_a_process_that_really_is_throttled_is_told_so(group: Path) -> None:
    program = f"""
import os, time
with open({str(group / "cgroup.procs")!r}, "w") as file:
    file.write(str(os.getpid()))
end = time.monotonic() + 0.3
while time.monotonic() < end:
    pass
from ortprep.diagnose.environment.facts.cgroups import read_limits
from ortprep.runtime.machine.hardware import read_hardware
limits = read_limits(read_hardware())
print(limits.quota_cores, limits.throttled_periods, limits.throttled_s)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    cores, throttled, seconds = said.split()
    assert float(cores) == 0.1
    assert int(throttled) > 0
    assert float(seconds) > 0


def test_a_folder_not_made_yet_is_on_the_disk_it_will_be_on(tmp_path: Path) -> None:
    room, there = read_disk_space(tmp_path / "not" / "made" / "yet"), read_disk_space(tmp_path)
    assert room is not None
    assert there is not None
    assert (room.total_bytes, room.kind) == (there.total_bytes, there.kind)


def test_the_innermost_mount_names_the_file_system(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    escaped = str(folder.resolve()).replace(" ", "\\040")
    lines = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw",
        f"2 1 0:9 / {escaped} rw shared:1 - tmpfs tmpfs rw",
        f"3 1 0:9 / {escaped} rw - nfs4 server:/ rw",
    )
    root = _write(tmp_path / "root", {"proc/self/mountinfo": "\n".join(lines)})
    room, outside = read_disk_space(folder, root), read_disk_space(tmp_path, root)
    assert room is not None
    assert outside is not None
    assert (room.kind, outside.kind) == ("nfs4", "ext4")


def test_a_tiny_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[1], fields[2], fields[4] = 4096, 16384, 16384  # f_frsize, f_blocks, f_bavail: 64 MiB
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    room = read_disk_space(tmp_path)
    assert room is not None
    assert room.total_bytes == 64 * MEBIBYTE
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
        "from ortprep.diagnose.environment.check import diagnose_environment;"
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
    limits = read_limits(read_hardware())
    assert isinstance(limits, ResourceLimits)
    assert limits.cores >= 1
    assert limits.memory_bytes > 0
