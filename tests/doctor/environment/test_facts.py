"""What is read of a machine: planted wheels, GPUs, control groups and file systems."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ortprep.doctor.environment import describe
from ortprep.doctor.environment_facts import (
    count_bus_gpus,
    read_disk_space,
    read_wheels,
)
from ortprep.runtime.machine.cgroups import ResourceLimits, read_limits
from ortprep.versions import installed_onnxruntime
from tests.doctor.environment.builders import HEALTHY, codes


def test_a_folder_not_made_yet_is_on_the_disk_it_will_be_on(tmp_path):
    assert read_disk_space(tmp_path / "not" / "made").total_bytes == read_disk_space(tmp_path).total_bytes


def plant_wheel(folder: Path, name: str, version: str, *owned: str, record: bool = True) -> None:
    """Leaves in a folder what installing a wheel leaves for package managers to see."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if record:
        files = owned or ("onnxruntime/__init__.py",)
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files), encoding="utf-8")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The only folder that Python imports from."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_every_wheel_that_owns_the_package_is_found(site):
    plant_wheel(site, "onnxruntime", "1.30.0")
    plant_wheel(site, "onnxruntime_gpu", "1.31.1")
    plant_wheel(site, "ort-nightly-gpu", "1.32.0.dev1")
    found = sorted(read_wheels().items())
    assert found == [
        ("onnxruntime", "1.30.0"),
        ("onnxruntime-gpu", "1.31.1"),
        ("ort-nightly-gpu", "1.32.0.dev1"),
    ]


def test_wheels_that_own_other_packages_are_not_onnx_runtime(site):
    plant_wheel(site, "onnxruntime-extensions", "0.14.0", "onnxruntime_extensions/__init__.py")
    plant_wheel(site, "onnxruntime-genai", "0.9.0", record=False)
    plant_wheel(site, "orthogonal", "1.0")
    assert read_wheels() == {}


def test_a_distribution_without_a_list_of_its_files_is_known_by_name(site):
    plant_wheel(site, "onnxruntime", "1.31.1", record=False)
    assert list(read_wheels()) == ["onnxruntime"]


def test_a_folder_half_deleted_is_passed_over(site):
    (site / "onnxruntime-1.31.1.dist-info").mkdir()
    assert read_wheels() == {}


def test_the_installed_wheel_is_found():
    assert list(read_wheels().values()) == [installed_onnxruntime()]


def test_a_wheel_that_another_folder_hides_is_none(site, monkeypatch):
    plant_wheel(site / "one", "onnxruntime", "1.30.0")
    plant_wheel(site / "two", "onnxruntime-gpu", "1.31.1")
    monkeypatch.setattr(sys, "path", [str(site / "two"), str(site / "one")])
    assert list(read_wheels()) == ["onnxruntime-gpu"]


def test_a_finder_that_a_package_put_in_python_s_place_changes_nothing(site):
    # MLflow's dependencies import the backport, which leaves out files that are not there.
    pytest.importorskip("importlib_metadata")
    plant_wheel(site, "onnxruntime", "1.30.0")
    (site / "half-1.0.dist-info").mkdir()
    assert list(read_wheels()) == ["onnxruntime"]


def _plant_device(sys: Path, name: str, vendor: str, kind: str) -> None:
    folder = sys / "bus/pci/devices" / name
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n", encoding="ascii")
    (folder / "class").write_text(f"{kind}\n", encoding="ascii")


def test_gpus_are_counted_on_the_bus_and_their_sound_devices_are_not(tmp_path):
    _plant_device(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    _plant_device(tmp_path, "0000:01:00.1", "0x10de", "0x040300")
    _plant_device(tmp_path, "0000:02:00.0", "0x10de", "0x030000")
    _plant_device(tmp_path, "0000:03:00.0", "0x8086", "0x030000")
    assert count_bus_gpus(tmp_path) == 2


def test_a_machine_without_a_bus_has_no_gpu(tmp_path):
    assert count_bus_gpus(tmp_path) == 0


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


def test_limits_are_those_of_the_strictest_level(tmp_path):
    limits = read_limits(_write(tmp_path, GROUPS))
    assert limits == ResourceLimits(1.5, 200, 50, 536_870_912)


def test_a_throttled_group_is_found(tmp_path):
    limits = read_limits(_write(tmp_path, GROUPS))
    found = codes(describe(replace(HEALTHY, limits=limits)).findings)
    assert {"cpu-throttled", "cores-above-quota", "memory-limited"} <= found


def test_the_least_of_all_levels_counts(tmp_path):
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
def test_no_limit_is_no_limit(tmp_path, files):
    assert read_limits(_write(tmp_path, files)) == ResourceLimits()


def test_a_tiny_shared_memory_really_mounted_is_found(tmp_path):
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("nothing can be mounted here")
    program = (
        "import sys; from pathlib import Path;"
        "from ortprep.doctor.environment import diagnose_environment;"
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


def test_limits_of_this_machine_are_read():
    limits = read_limits()
    assert limits.quota_cores is None or limits.quota_cores > 0
    assert limits.memory_bytes is None or limits.memory_bytes > 0
