import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.manifest import (
    Decision,
    MeasurementRecord,
    VariantRecord,
    VerificationRecord,
    read_manifest,
    write_manifest,
)
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.errors import PoolError
from ortprep.runtime.loading.opened_bundle import limit_threads
from ortprep.runtime.machine.hardware import Gpu, Hardware
from ortprep.runtime.placement import (
    Device,
    ModelLoad,
    device_variables,
    place_models,
    read_load,
    resolve_devices,
)
from tests.runtime.builders import COLUMNS, ROWS, TWO_PRECISIONS, write_converted

_MODELS = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 50)), min_size=1, max_size=6).map(
    lambda pairs: [ModelLoad(f"m{n}", float(cost), memory) for n, (cost, memory) in enumerate(pairs)]
)


def best_makespan(models, devices):
    return min(
        max(sum(m.cost_ms for m, at in zip(models, places, strict=True) if at == d) for d in range(devices))
        for places in itertools.product(range(devices), repeat=len(models))
    )


@given(_MODELS, st.integers(1, 3))
def test_without_limits_the_makespan_is_within_a_third_of_the_best(models, devices):
    placement = place_models(models, [Device("cuda", n) for n in range(devices)])
    assert placement.makespan_ms <= best_makespan(models, devices) * (4 / 3) + 1e-5


@given(_MODELS, st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_every_model_is_somewhere_and_no_memory_is_exceeded(models, memories):
    rooms = [Device("cuda", n, memory) for n, memory in enumerate(memories)]
    try:
        placement = place_models(models, rooms)
    except PoolError as error:
        if "no device has room" not in error.message:
            raise
        return
    sizes = {model.name: model.memory_bytes for model in models}
    for assignment, room in zip(placement.assignments, rooms, strict=True):
        assert len(set(assignment.models)) == len(assignment.models)
        assert assignment.memory_bytes == sum(sizes[name] for name in assignment.models)
        assert assignment.memory_bytes <= room.memory_bytes
    assert {name for a in placement.assignments for name in a.models} == set(sizes)
    assert len(placement.reasons) == sum(len(a.models) for a in placement.assignments)


def test_devices_that_would_stay_empty_take_copies_of_the_bottleneck():
    models = [ModelLoad("small", 10.0, 1), ModelLoad("large", 90.0, 1)]
    placement = place_models(models, [Device("cuda", n) for n in range(4)])
    assert [a.models for a in placement.assignments] == [("large",), ("small",), ("large",), ("large",)]
    assert placement.makespan_ms == 30.0


def test_what_fits_nowhere_is_named():
    with pytest.raises(PoolError, match=r"no device has room for big(?s:.*)cuda:0: 0 MB of 8 MB taken"):
        place_models([ModelLoad("big", 1.0, 9 * 2**20)], [Device("cuda", 0, 8 * 2**20)])


MB = 2**20
STEADY_MS = {part.name: 1.0 + part.seed for part in TWO_PRECISIONS}
PRIVATE_MB = {part.name: 10.0**part.seed for part in TWO_PRECISIONS}


def summary(median):
    return Samples((median,) * 3)


def record_of(name, *, plan="prepared"):
    ms, mb = summary(STEADY_MS[name]), summary(PRIVATE_MB[name])
    figures = PlanFigures(plan, ms, ms, ms, ms, mb, mb)
    verification = VerificationRecord(1e-3, 1e-5, 1, "seeded", (), ())
    # A fork's own memory and one-thread runs say nothing about a process that loads.
    forked = dataclasses.replace(figures, steady_ms=summary(1e6), private_mb=summary(0.1))
    by_cache = {"forked": forked, "warm": figures}
    measured = tuple(MeasurementRecord(cache, 3, "x=[2,8]", (one,)) for cache, one in by_cache.items())
    return VariantRecord(name, "cpu", "all", (), verification, measured, Decision(plan, "sooner"))


@pytest.fixture
def bundle(tmp_path):
    folder = write_converted(tmp_path / "bundle")
    manifest = read_manifest(folder)
    records = tuple(record_of(part.name) for part in TWO_PRECISIONS)
    write_manifest(folder, dataclasses.replace(manifest, variants=records))
    return folder


def files_bytes(bundle, name):
    return sum(file.stat().st_size for file in (bundle / name).glob("*.onnx*"))


@pytest.mark.parametrize(
    ("precision", "name"), [("fp32", "cpu"), ("int8", "cpu-int8"), ("fastest-within-gate", "cpu")]
)
@pytest.mark.parametrize("copies", [1, 3])
def test_memory_and_time_are_those_of_the_variant_that_is_loaded(bundle, precision, name, copies):
    load = read_load("m", bundle, "cpu", copies=copies, precision=precision)
    assert load.memory_bytes == int(PRIVATE_MB[name] * MB) * copies + files_bytes(bundle, name)
    assert load.cost_ms == STEADY_MS[name]


def test_without_measurements_the_size_of_the_weights_stands_for_both(tmp_path):
    bundle = write_converted(tmp_path / "bundle", TWO_PRECISIONS[:1])
    load = read_load("m", bundle, "cpu")
    assert load.memory_bytes == files_bytes(bundle, "cpu") > ROWS * COLUMNS * 4
    assert load.cost_ms == load.memory_bytes / MB


def test_a_portable_graph_that_is_shipped_for_a_target_costs_what_it_was_measured_at(tmp_path):
    parts = (dataclasses.replace(TWO_PRECISIONS[0], name="portable"),)
    bundle = write_converted(tmp_path / "bundle", parts)
    manifest = read_manifest(bundle)
    records = (record_of("cpu", plan="portable"),)
    write_manifest(bundle, dataclasses.replace(manifest, variants=records))
    assert read_load("m", bundle, "cpu").cost_ms == STEADY_MS["cpu"]


# -- test_environment

GPU = Gpu("a GPU", (9, 0), 80 * 2**30, "580", "13.0", "GPU-0")
CPU = Device("cpu")


def machine(gpus):
    return Hardware("x86_64", "", (), 8, 2**34, (GPU,) * gpus)


def names(devices):
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


def plan(threads=None, **more):
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


def threads_of(limited):
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
