"""What the rules say of made-up machines, and of what several versions of ONNX Runtime really said."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from typing import NamedTuple

import pytest

from ortprep.children.bytecode import Bytecode
from ortprep.doctor import environment
from ortprep.doctor.diagnosis import SEVERITIES, Finding, Severity, diagnose
from ortprep.doctor.environment import describe
from ortprep.doctor.environment_facts import (
    DiskSpace,
    Facts,
    InstalledRuntime,
    ResourceLimits,
    read_disk_space,
    read_limits,
)
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.versions import read_wheels
from tests.conftest import ROOT
from tests.doctor.environment.builders import (
    GB,
    HEALTHY,
    RECORDINGS,
    SITE,
    WITHOUT_GPU,
    codes,
    one,
    read_recording,
)

MEBIBYTE = 1024 * 1024


class FactsCase(NamedTuple):
    """Something that is wrong with a machine, and how it is to be called."""

    code: str
    severity: Severity
    facts: Facts


def having(facts=HEALTHY, **changes):
    return replace(facts, **changes)


def _limits(**changes):
    return having(limits=replace(HEALTHY.limits, **changes))


def _imported(facts=HEALTHY, **changes):
    return having(facts, runtime=replace(facts.runtime, **changes))


BOTH = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
BROKEN = InstalledRuntime(error="ImportError: no module named onnxruntime.capi")
NO_CUDA = _imported(WITHOUT_GPU, package="onnxruntime", available=(CPU,))
ASKED = (CUDA,)

CASES = (
    FactsCase("no-onnxruntime", "problem", having(wheels={}, runtime=BROKEN, providers={})),
    FactsCase("onnxruntime-broken", "problem", having(runtime=BROKEN, providers={})),
    FactsCase("both-wheels-installed", "problem", having(wheels=BOTH)),
    FactsCase("onnxruntime-version-differs", "problem", _imported(version="1.30.0")),
    FactsCase("onnxruntime-too-old", "problem", _imported(version="1.22.1")),
    FactsCase("no-bytecode", "advice", _imported(bytecode=Bytecode(missing=300, packages=SITE))),
    FactsCase("usage-data-off", "ok", HEALTHY),
    FactsCase("usage-data-off", "ok", having(variables={"ORT_DISABLE_TELEMETRY": "true"})),
    FactsCase("usage-data-sent", "advice", having(variables={"ORT_DISABLE_TELEMETRY": "0"})),
    FactsCase("provider-usable", "ok", HEALTHY),
    FactsCase("provider-unusable", "problem", having(providers={CUDA: "CUDA failure 100", CPU: None})),
    FactsCase("provider-unusable", "note", WITHOUT_GPU),
    FactsCase("provider-unusable", "problem", having(WITHOUT_GPU, expected=ASKED)),
    FactsCase("provider-not-in-wheel", "problem", having(NO_CUDA, expected=ASKED)),
    FactsCase("no-gpu", "problem", having(WITHOUT_GPU, expected=ASKED)),
    FactsCase("gpu-unused", "advice", having(NO_CUDA, gpus=HEALTHY.gpus)),
    FactsCase("gpu-unused", "problem", having(NO_CUDA, gpus=HEALTHY.gpus, expected=ASKED)),
    FactsCase("no-avx2", "advice", having(hardware=HEALTHY.hardware._replace(cpu_features=("avx",)))),
    FactsCase("cores-above-quota", "advice", _limits(quota_cores=2.5)),
    FactsCase("cpu-throttled", "advice", _limits(quota_cores=8.0, periods=100, throttled_periods=40)),
    FactsCase("cpu-throttled", "note", _limits(quota_cores=8.0, periods=1000, throttled_periods=1)),
    FactsCase(
        "small-shared-memory",
        "advice",
        having(shared_memory=DiskSpace("/dev/shm", 64 * MEBIBYTE, 64 * MEBIBYTE)),
    ),
    FactsCase("small-shared-memory", "advice", having(shared_memory=DiskSpace("/dev/shm"))),
    FactsCase("low-space", "problem", having(artifacts=DiskSpace("/srv", 9 * GB, GB // 2))),
    FactsCase("low-space", "advice", having(artifacts=DiskSpace("/srv", 9 * GB, 3 * GB))),
)


def find(facts):
    return describe(facts).findings


def test_every_code_is_documented_and_tested():
    page = (ROOT.parent / "docs/doctor.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", page.partition("## Findings of `env`")[2], re.MULTILINE)
    sources = inspect.getsource(environment)
    written = re.findall(r'Finding\(\s*"([a-z0-9-]+)"', sources)
    assert set(written) == set(listed) == {case.code for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.severity}")
def test_every_case_is_found_with_its_severity_and_says_how_to_mend_it(case):
    found = find(case.facts)
    assert (case.code, case.severity) in {(finding.code, finding.severity) for finding in found}
    assert all(finding.hint or finding.severity in ("ok", "note") for finding in found)


def test_a_variable_that_hides_gpus_is_named():
    hidden = having(WITHOUT_GPU, expected=ASKED, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert "CUDA_VISIBLE_DEVICES=''" in one(find(hidden), "no-gpu").text


def test_nothing_but_good_is_found_where_nothing_is_wrong():
    assert {finding.severity for finding in find(having(expected=(CUDA, CPU)))} == {"ok"}
    assert "problem" not in {finding.severity for finding in find(WITHOUT_GPU)}


def test_versions_and_machines_that_suffice_are_not_found_wanting():
    enough = having(_limits(quota_cores=2.5), hardware=HEALTHY.hardware._replace(cores=3))
    assert "cores-above-quota" not in codes(find(enough))
    arm = HEALTHY.hardware._replace(machine="aarch64", cpu_features=("asimd",))
    assert "no-avx2" not in codes(find(having(hardware=arm)))


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recorded_wheel_is_understood_on_a_machine_with_and_without_a_gpu(name):
    facts = read_recording(name, WITHOUT_GPU)
    assert facts.providers[CPU] is None
    diagnosis = describe(read_recording(name, having(expected=ASKED)))
    assert len(diagnosis.tables) >= 3
    for table in diagnosis.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    if CUDA not in facts.runtime.available:
        assert {finding.severity for finding in find(facts)} == {"ok"}
        found = one(diagnosis.findings, "provider-not-in-wheel")
        assert "onnxruntime-gpu[cuda,cudnn]" in str(found.hint)
        return
    reason, major = facts.providers[CUDA], facts.runtime.cuda_version.partition(".")[0]
    assert str(reason).startswith(f"libcublasLt.so.{major}: cannot open shared object file")
    assert "\x1b" not in str(reason)
    cuda = next(one for one in diagnosis.findings if one.text.startswith("CUDA: "))
    assert (cuda.code, cuda.severity) == ("provider-unusable", "problem")
    assert "onnxruntime-gpu[cuda,cudnn]" in str(cuda.hint)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_only_a_problem_is_a_failure(severity):
    assert diagnose("env", [Finding("x", severity, "")]).exit_code == (severity == "problem")
    found = diagnose("env", [Finding(one, one, "") for one in SEVERITIES])
    assert [one.severity for one in found.findings] == list(reversed(SEVERITIES))


# -- what is read of a machine: planted wheels, GPUs, control groups and file systems


def test_a_folder_not_made_yet_is_on_the_disk_it_will_be_on(tmp_path):
    assert read_disk_space(tmp_path / "not" / "made").total_bytes == read_disk_space(tmp_path).total_bytes


def plant_wheel(folder, name, version):
    """Leaves in a folder what installing a wheel leaves for package managers to see."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (info / "RECORD").write_text("onnxruntime/__init__.py,,\n", encoding="utf-8")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The only folder that Python imports from."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_every_wheel_that_owns_the_package_is_found(site):
    plant_wheel(site, "onnxruntime", "1.30.0")
    plant_wheel(site, "onnxruntime_gpu", "1.31.1")
    plant_wheel(site, "onnxruntime-extensions", "0.14.0")
    assert read_wheels() == {"onnxruntime-gpu": "1.31.1", "onnxruntime": "1.30.0"}


def test_a_wheel_that_was_left_half_deleted_is_none(site):
    (site / "onnxruntime-1.31.1.dist-info").mkdir()
    assert read_wheels() == {}


def _write(root, files):
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
    stricter = _write(tmp_path, {"sys/fs/cgroup/pods/cpu.max": "50000 100000\n"})
    assert read_limits(stricter).quota_cores == 0.5
