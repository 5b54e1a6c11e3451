"""Threads that fit the share: cores that the process may use, divided by the workers that share them."""

import ctypes
import os
import platform
from pathlib import Path

import pytest

from ortprep.bundle.loader_config import read_loader_config
from ortprep.errors import LoadError
from ortprep.runtime import PoolConfig, load
from ortprep.runtime.machine import processor
from ortprep.runtime.machine.hardware import (
    Gpu,
    Hardware,
    hardware_fingerprint,
    nchwc_block_size,
    parse_cpuinfo,
    read_gpus,
    read_hardware,
)
from ortprep.runtime.machine.processor import find_thread_limit, usable_cores
from ortprep.runtime.pool.config import plan_workers
from tests.runtime.builders import write_bundle

pytestmark = pytest.mark.runtime

AVX2 = ("avx", "avx2", "fma")


def machine(features, name="x86_64"):
    return Hardware(name, "", features, 1, 2**30)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 flags")
def test_the_processor_and_the_kernel_agree_on_this_machine():
    _, listed = parse_cpuinfo(Path("/proc/cpuinfo").read_text())
    here = read_hardware(gpus=False)
    assert set(here.cpu_features) == set(listed)
    assert list(here.cpu_features) == sorted(listed)
    assert here.cores == len(os.sched_getaffinity(0))
    assert here.memory_bytes > 2**27


UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"


class OneGpu:
    """The CUDA driver of a machine with one GPU, which has a UUID and is zero in all else."""

    def __getattr__(self, name):
        return lambda *_: 0

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = 1
        return 0

    def cuDeviceGetUuid_v2(self, uuid, _):  # noqa: N802
        uuid[:] = bytes.fromhex(UUID.removeprefix("GPU-").replace("-", ""))
        return 0


class OldDriver:
    """The same machine with a driver of before CUDA 11.4."""

    def __getattr__(self, name):
        if name == "cuDeviceGetUuid_v2":
            raise AttributeError(name)
        return getattr(OneGpu(), name.replace("cuDeviceGetUuid", "cuDeviceGetUuid_v2"))


@pytest.mark.parametrize("driver", [OneGpu, OldDriver])
def test_a_gpus_name_is_written_as_nvidia_writes_it(monkeypatch, driver):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver())
    assert [gpu.uuid for gpu in read_gpus()] == [UUID]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz: fast\nflags\t\t: fpu avx2\n\nprocessor\t: 1\n",
            ("Some CPU @ 2.0GHz: fast", {"fpu", "avx2"}),
        ),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm\n", ("", {"fp", "asimd", "i8mm"})),
    ],
    ids=["x86", "arm"],
)
def test_features_of_a_processor_are_parsed(text, found):
    assert parse_cpuinfo(text) == found


@pytest.mark.parametrize(
    ("features", "size"), [((), 1), (("sse4_2",), 1), (("avx",), 8), (AVX2, 8), ((*AVX2, "avx512f"), 16)]
)
def test_the_block_size_follows_the_instruction_set(features, size):
    assert nchwc_block_size(machine(features)) == size


def test_a_cpu_fingerprint_ignores_gpus_and_irrelevant_flags():
    plain = machine((*AVX2, "erms"))
    gpu = Gpu("H200", (9, 0), 1, "580", "13.0", "GPU-1")
    assert hardware_fingerprint("cpu", plain) == hardware_fingerprint(
        "cpu", plain._replace(cpu_features=AVX2, gpus=(gpu,), cpu_model="other")
    )


@pytest.mark.parametrize(
    "change",
    [{"name": "B200"}, {"compute_capability": (10, 0)}, {"driver_version": "590"}, {"cuda_version": "13.1"}],
)
def test_a_cuda_fingerprint_changes_with_gpu_and_driver(change):
    gpu = Gpu("H200", (9, 0), 1, "580", "13.0", "GPU-1")
    here = machine(AVX2)._replace(gpus=(gpu,))
    there = here._replace(gpus=(gpu._replace(**change),))
    assert hardware_fingerprint("cuda", here) != hardware_fingerprint("cuda", there)
    elsewhere = here._replace(gpus=(gpu._replace(uuid="GPU-2"),))
    assert hardware_fingerprint("cuda", here) == hardware_fingerprint("cuda", elsewhere)


# -- threads that fit the share: cores that the process may use, divided by the workers that share them

V1 = "4:cpu,cpuacct:/pods/job\n9:memory:/pods/job\n"
V1_FOLDER = "sys/fs/cgroup/cpu,cpuacct"


@pytest.fixture
def eight_cores(monkeypatch):
    read_hardware()  # remembered by the process, so before it looks different
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in processor.WORKER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def write_machine(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return str(root)


@pytest.mark.usefixtures("eight_cores")
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
    assert usable_cores(write_machine(tmp_path, files)) == expected


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("environment", "passed", "expected"),
    [
        ({}, None, None),
        ({"WEB_CONCURRENCY": "1"}, None, None),
        ({"WEB_CONCURRENCY": "4"}, None, 2),
        ({"WEB_CONCURRENCY": "100"}, None, 1),
        ({"WEB_CONCURRENCY": "4", "ORTPREP_WORKERS": "2"}, None, 4),
        ({"WEB_CONCURRENCY": "4", "ORTPREP_WORKERS": "1"}, None, None),
        *(({"ORTPREP_WORKERS": text}, None, None) for text in ("", "0", "-2", "two", "9" * 99)),
        *(({"ORTPREP_WORKERS": "5"}, *pair) for pair in [(1, None), (2, 4), (3, 2), (8, 1), (100, 1)]),
    ],
)
def test_workers_share_the_cores(tmp_path, environment, passed, expected):
    limit = find_thread_limit(environment, str(tmp_path), workers=passed)
    assert (None if limit is None else limit[0]) == expected


@pytest.mark.usefixtures("eight_cores")
def test_a_session_takes_its_share_unless_the_application_says_otherwise(tmp_path, monkeypatch):
    bundle = write_bundle(tmp_path / "b")

    def threads(workers=None, **own):
        session = load(bundle, session_options=own or None, workers=workers)
        return int(session.get_session_options().intra_op_num_threads)

    before = threads()
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    assert (before, threads(), threads(8), threads(1)) == (0, 2, 1, 0)
    assert (threads(intra_op_num_threads=3), threads(8, intra_op_num_threads=3)) == (3, 3)
    assert os.environ["WEB_CONCURRENCY"] == "4"


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize("workers", [0, -1, 2.5, True, "2"])
def test_what_is_no_number_of_workers_is_refused(tmp_path, workers):
    with pytest.raises(LoadError, match="bad argument of load: workers="):
        load(tmp_path, workers=workers)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("count", "expected"), [(1, None), (2, 4), (16, 1)])
def test_workers_of_a_pool_share_the_cores(tmp_path, count, expected):
    bundle = write_bundle(tmp_path / "b")
    config = PoolConfig(devices="cpu", workers_per_device=count)
    workers, *_ = plan_workers({"b": bundle}, {"b": read_loader_config(bundle)}, config)
    assert [worker.job.load.threads for worker in workers] == [expected] * count
