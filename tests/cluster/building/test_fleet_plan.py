"""What is prepared on which kind of node, by labels that say what a machine is."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.cluster.building.fleet_plan import ClusterNode, describe_hardware, plan_fleet, reserve
from ortprep.errors import SpecError
from ortprep.runtime.machine.hardware import Gpu, Hardware, read_hardware
from ortprep.spec.fleet import DEFAULT_FLEET, Fleet, HardwareKind
from ortprep.spec.models import ModelSpec


def spec(name: str = "net", **sections: Any) -> ModelSpec:
    return ModelSpec.model_validate({"name": name, "source": {"demo": "squeezenet"}, **sections})


def node(name: str = "n", *, cpus: float = 4, gpus: float = 0, **labels: str) -> ClusterNode:
    return ClusterNode(
        name, name, {f"ortprep.io/{key}": value for key, value in labels.items()}, {"CPU": cpus, "GPU": gpus}
    )


FLEET = Fleet(
    hardware={
        "old": HardwareKind(target="cpu", labels={"ortprep.io/avx512f": "!true"}),
        "new": HardwareKind(target="cpu", labels={"ortprep.io/avx512f": "true"}),
        "big": HardwareKind(target="cuda", labels={"ortprep.io/gpu": "in(H100, H200)"}),
    }
)
NODES = (node("a"), node("b", avx512f="true"), node("c", gpus=8, avx512f="true", gpu="H200"))


def places(
    specs: list[ModelSpec], nodes: tuple[ClusterNode, ...] = NODES, **wanted: Any
) -> set[tuple[str, str, str]]:
    plan = plan_fleet(specs, wanted.pop("fleet", FLEET), nodes, **wanted)
    return {(share.spec.name, share.kind, share.target) for share in plan.assignments}


def test_auto_is_prepared_on_every_kind_that_has_a_node():
    assert places([spec()]) == {("net", "old", "cpu"), ("net", "new", "cpu"), ("net", "big", "cuda")}
    assert places([spec()], NODES[:1]) == {("net", "old", "cpu")}


def test_named_targets_are_prepared_on_every_kind_of_theirs():
    assert places([spec(targets=["cpu"])]) == {("net", "old", "cpu"), ("net", "new", "cpu")}


def test_a_kind_without_a_node_is_told_with_all_others_and_with_what_there_is():
    with pytest.raises(SpecError) as caught:
        plan_fleet([spec("one", targets=["cpu", "cuda"]), spec("two", targets=["cuda"])], FLEET, NODES[1:2])
    text = str(caught.value)
    assert "one on old: expected a node with ortprep.io/avx512f=!true, got none" in text
    assert "one on big: expected a node with ortprep.io/gpu=in(H100, H200), GPU: 1, got none" in text
    assert "two on big" in text
    assert "b: CPU 4, GPU 0, ortprep.io/avx512f=true" in text


def test_what_has_no_node_is_left_out_when_the_user_says_so_and_named():
    plan = plan_fleet([spec(targets=["cpu", "cuda"])], FLEET, NODES[1:2], skip_unavailable=True)
    assert [one.kind for one in plan.assignments] == ["new"]
    assert set(plan.left_out) == {"net on old", "net on big"}


def test_a_model_of_which_nothing_is_left_is_an_error_all_the_same():
    with pytest.raises(SpecError, match="net: none of big has a node"):
        plan_fleet([spec(targets=["cuda"])], FLEET, NODES[:1], skip_unavailable=True)


def test_one_kind_or_one_target_can_be_prepared_alone():
    assert places([spec()], only="new") == {("net", "new", "cpu")}
    assert places([spec()], only="cuda") == {("net", "big", "cuda")}
    with pytest.raises(SpecError, match="no such hardware in the fleet: tpu"):
        places([spec()], only="tpu")


def test_a_target_that_no_kind_is_for_is_told():
    cpus = Fleet(hardware={"new": FLEET.hardware["new"]})
    with pytest.raises(SpecError, match="no kind of hardware in the fleet offers target cuda"):
        places([spec(targets=["cpu", "cuda"])], fleet=cpus)


def test_without_a_fleet_any_node_is_a_cpu_and_any_with_a_gpu_a_cuda():
    assert places([spec()], (node(),), fleet=DEFAULT_FLEET) == {("net", "cpu", "cpu")}
    both = places([spec()], (node(gpus=1),), fleet=DEFAULT_FLEET)
    assert both == {("net", "cpu", "cpu"), ("net", "cuda", "cuda")}


def test_a_head_that_runs_nothing_is_no_cpu():
    with pytest.raises(SpecError):
        places([spec()], (node(cpus=0),), fleet=DEFAULT_FLEET)


@given(st.lists(st.integers(1, 256), min_size=1))
def test_a_cpu_is_reserved_whole_and_a_gpu_alone(sizes):
    nodes = [node(f"n{index}", cpus=size, gpus=1) for index, size in enumerate(sizes)]
    on_cpu, on_gpu = (reserve(DEFAULT_FLEET.hardware[target], nodes) for target in ("cpu", "cuda"))
    # What every node of the kind has, and of the smallest all.
    assert on_cpu.cpus == min(sizes)
    assert (on_gpu.gpus, on_gpu.cpus) == (1, 1)


@pytest.mark.parametrize(
    ("selector", "value", "fits"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", None, True),
        ("!a", "a", False),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("in(a)", None, False),
        ("!in(a, b)", "c", True),
        ("!in(a, b)", "a", False),
        ("!in(a, b)", None, True),
    ],
)
def test_labels_are_selected_as_ray_does(selector, value, fits):
    kind = HardwareKind(target="cpu", labels={"ortprep.io/x": selector})
    labels = {} if value is None else {"ortprep.io/x": value}
    assert kind.fits(labels, {"CPU": 1}) is fits


def test_custom_resources_count():
    kind = HardwareKind(target="cpu", resources={"quiet": 1})
    assert not kind.fits({}, {"CPU": 4})
    assert kind.fits({}, {"CPU": 4, "quiet": 1})


VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


def hardware(cpu: str, gpu: str | None) -> Hardware:
    gpus = () if gpu is None else (Gpu(gpu, (9, 0), 1, "580", "13.0", "GPU-1"),)
    return Hardware("x86_64", cpu, ("avx2", "avx512f", "fma"), 4, 2**30, gpus)


@given(st.text(max_size=100), st.none() | st.text(max_size=100))
def test_every_value_is_one_that_ray_takes(cpu, gpu):
    for key, value in describe_hardware(hardware(cpu, gpu)).items():
        assert VALUE.fullmatch(value)
        assert key.startswith("ortprep.io/")


def test_instruction_sets_and_the_gpu_are_told():
    labels = describe_hardware(hardware("Intel(R) Xeon(R) CPU @ 2.50GHz", "NVIDIA H200"))
    assert labels == {
        "ortprep.io/machine": "x86_64",
        "ortprep.io/cpu": "Intel-R-Xeon-R-CPU-2.50GHz",
        "ortprep.io/avx2": "true",
        "ortprep.io/avx512f": "true",
        "ortprep.io/gpu": "NVIDIA-H200",
        "ortprep.io/compute-capability": "9.0",
    }


def test_this_machine_has_some():
    assert describe_hardware(read_hardware())["ortprep.io/machine"]
