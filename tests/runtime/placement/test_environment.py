from __future__ import annotations

import pytest

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.errors import PoolError
from ortprep.runtime.loading.opened_bundle import limit_threads
from ortprep.runtime.machine.hardware import Gpu, Hardware
from ortprep.runtime.placement.devices import Device, device_variables, resolve_devices

GPU = Gpu("a GPU", (9, 0), 80 * 2**30, "580", "13.0", "GPU-0")
CPU = Device("cpu")


def machine(gpus: int) -> Hardware:
    return Hardware("x86_64", "", (), 8, 2**34, (GPU,) * gpus)


def names(devices: tuple[Device, ...]) -> list[str]:
    return [device.name for device in devices]


def test_all_means_every_gpu_or_else_the_cpu():
    assert names(resolve_devices("all", machine(3))) == ["cuda:0", "cuda:1", "cuda:2"]
    assert names(resolve_devices("all", machine(0))) == ["cpu"]
    assert names(resolve_devices(["all"], machine(1))) == ["cuda:0"]
    assert names(resolve_devices(["cpu", "cuda:1"], machine(2))) == ["cpu", "cuda:1"]
    assert names(resolve_devices("cuda:1", machine(2))) == ["cuda:1"]


@pytest.mark.parametrize("wanted", [[], ["cpu", "cpu"], "cuda:2", "cuda", "gpu", ["tpu:0"], "cuda:-1"])
def test_what_is_not_there_is_refused_by_name(wanted):
    with pytest.raises(PoolError, match="device"):
        resolve_devices(wanted, machine(2))


def test_a_worker_on_the_cpu_sees_no_gpu():
    assert device_variables(CPU, "0,1") == {"CUDA_VISIBLE_DEVICES": ""}


def plan(threads: int | None = None, **more: int) -> SessionPlan:
    attributes = {} if threads is None else {"intra_op_num_threads": threads}
    options = SessionOptionsRecord("ORT_DISABLE_ALL", {**attributes, **more}, {})
    return SessionPlan("m.onnx", options, (ProviderRecord("CPUExecutionProvider"),))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0", "1"]), ("3,5", ["3", "5"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]), ("", ["0", "1"])],
)
def test_a_worker_sees_its_own_gpu_alone(visible, expected):
    found = [device_variables(Device("cuda", ordinal), visible) for ordinal in (0, 1)]
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in found] == expected
    assert all(variables["CUDA_MODULE_LOADING"] == "LAZY" for variables in found)


def threads_of(limited: SessionPlan) -> object:
    return limited.session_options.attributes.get("intra_op_num_threads")


def test_a_plan_takes_no_more_than_its_share():
    assert threads_of(limit_threads(plan(), 2, may_spin=True)) == 2
    assert threads_of(limit_threads(plan(0), 2, may_spin=True)) == 2
    assert threads_of(limit_threads(plan(8), 2, may_spin=True)) == 2
    assert threads_of(limit_threads(plan(1), 2, may_spin=True)) == 1
    assert threads_of(limit_threads(plan(8), None, may_spin=True)) == 8
    assert limit_threads(plan(), None, may_spin=True) == plan()


def test_threads_between_operators_are_limited_where_there_are_any():
    parallel = limit_threads(plan(8, inter_op_num_threads=6), 2, may_spin=True)
    assert parallel.session_options.attributes == {"intra_op_num_threads": 2, "inter_op_num_threads": 2}


def test_who_shares_cores_does_not_spin():
    entries = limit_threads(plan(), 2, may_spin=False).session_options.config_entries
    assert entries["session.intra_op.allow_spinning"] == "0"
