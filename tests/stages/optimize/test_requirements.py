from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.loader_config import ComputeCapabilityRange, Requirements, VersionRange
from ortprep.bundle.model_facts import ModelFacts, ModelInterface
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.runtime.machine.hardware import Gpu, Hardware
from ortprep.stages.optimize.graph_writer import SaveResult
from ortprep.stages.optimize.requirements import (
    derive_requirements,
    find_integer_type,
    readable_versions,
    with_options,
)

AVX2 = Hardware("x86_64", "Haswell", ("avx", "avx2", "fma"), cores=2, memory_bytes=2**30)
AVX512 = Hardware("x86_64", "Icelake", ("avx", "avx2", "avx512f", "fma"), cores=2, memory_bytes=2**30)
ARM = Hardware("aarch64", "Neoverse", ("asimd",), cores=2, memory_bytes=2**30)
HOPPER = Gpu("H200", (9, 0), 2**37, "580.1", "13.0", "GPU-1")
AMPERE = Gpu("A10", (8, 6), 2**34, "580.1", "13.0", "GPU-2")
BLOCKED = ("", "com.microsoft.nchwc")


PLAIN, ON_CPU = SessionOptionsRecord("ORT_DISABLE_ALL"), (ProviderRecord("CPUExecutionProvider"),)


def saved(*domains: str, opset: int = 17, ir_version: int = 8, onnxruntime: str = "1.31.1") -> SaveResult:
    operators = {f"{domain}.Relu" if domain else "Relu": 1 for domain in domains}
    interface = ModelInterface((), (), {}, external=False)
    facts = ModelFacts(interface, {"": opset}, ir_version, operators, 0, {})
    return SaveResult(facts, (), onnxruntime)


def derive(
    hardware: Hardware, domains: tuple[str, ...] = ("",), *, device_id: int | None = None
) -> Requirements:
    gpu = (ProviderRecord("CUDAExecutionProvider", {"device_id": str(device_id)}),)
    providers = ON_CPU if device_id is None else gpu
    return derive_requirements(saved(*domains), PLAIN, providers, portable=False, hardware=hardware)


def test_a_graph_of_onnx_operators_needs_no_particular_machine():
    assert derive(AVX512) == Requirements(VersionRange("1.23"), ("CPUExecutionProvider",))


def test_blocks_of_16_need_avx512():
    needs = derive(AVX512, BLOCKED)
    assert needs.machine == "x86_64"
    assert "avx512f" in needs.cpu_features
    assert needs.cpu_features_absent == ()


def test_blocks_of_8_need_avx_and_a_machine_that_has_no_larger_blocks():
    needs = derive(AVX2, BLOCKED)
    assert (needs.machine, needs.cpu_features, needs.cpu_features_absent) == (
        "x86_64",
        ("avx",),
        ("avx512f",),
    )


def test_blocks_of_another_architecture_bind_to_it_without_flags_of_x86():
    needs = derive(ARM, BLOCKED)
    assert (needs.machine, needs.cpu_features, needs.cpu_features_absent) == ("aarch64", (), ())


def test_a_gpu_of_the_next_major_compute_capability_is_another_machine():
    hardware = Hardware("x86_64", "", (), cores=2, memory_bytes=2**30, gpus=(HOPPER, AMPERE))
    assert derive(hardware, device_id=0).compute_capability == ComputeCapabilityRange((9, 0), (10, 0))
    assert derive(hardware, device_id=1).compute_capability == ComputeCapabilityRange((8, 6), (9, 0))


def test_operators_of_onnx_runtime_bind_to_its_minor_version():
    versions = readable_versions(saved("", "com.microsoft"), portable=False)
    assert versions == VersionRange("1.31", "1.32")


def test_f11_operators_that_the_source_brought_bind_to_no_newest_version():
    versions = readable_versions(saved("", "com.microsoft"), portable=True)
    assert versions == VersionRange("1.31")


@pytest.mark.parametrize(
    ("opset", "ir_version", "minimum"),
    [
        (17, 8, "1.23"),
        (23, 11, "1.23"),
        (24, 11, "1.24"),
        (23, 12, "1.24"),
        (26, 13, "1.25"),
        (27, 14, "1.31"),
    ],
)
def test_the_oldest_version_that_reads_opset_and_ir_version_is_the_minimum(opset, ir_version, minimum):
    versions = readable_versions(saved("", opset=opset, ir_version=ir_version), portable=False)
    assert versions == VersionRange(minimum)


@given(
    opset=st.integers(7, 40),
    ir_version=st.integers(3, 20),
    domains=st.sets(st.sampled_from(["", "ai.onnx.ml", "com.microsoft"])),
    installed=st.integers(23, 40),
    portable=st.booleans(),
)
def test_the_version_that_wrote_a_graph_always_reads_it(opset, ir_version, domains, installed, portable):
    graph = saved(*domains, opset=opset, ir_version=ir_version, onnxruntime=f"1.{installed}.0")
    versions = readable_versions(graph, portable=portable)
    assert int(versions.minimum.split(".")[1]) <= installed
    assert versions.below is None or int(versions.below.split(".")[1]) > installed


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", ("avx2", "avx512_vnni", "amx_int8"), "uint8"),
        ("x86_64", ("avx2", "avx_vnni"), "uint8"),
        ("x86_64", ("avx2", "avx512f"), None),
        ("aarch64", ("asimddp",), "int8"),
    ],
)
def test_integers_are_for_processors_that_multiply_them_exactly(machine, features, expected):
    hardware = Hardware(machine, "", features, cores=2, memory_bytes=2**30)
    assert find_integer_type(hardware) == expected


def test_an_option_raises_the_oldest_version_to_the_one_that_brought_it():
    plain = SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": 1})
    parallel = SessionOptionsRecord("ORT_DISABLE_ALL", {}, {"session.prepack.enable_parallel": "1"})
    cpu = (ProviderRecord("CPUExecutionProvider"),)
    cuda = (ProviderRecord("CUDAExecutionProvider", {"external_data_loader_reading_threads": "8"}),)
    any_version = VersionRange("1.23")
    assert with_options(any_version, plain, cpu, installed="1.31.1") == any_version
    assert with_options(any_version, parallel, cpu, installed="1.31.1").minimum.startswith("1.31")
    assert with_options(any_version, plain, cuda, installed="1.31.1").minimum.startswith("1.31")
    unlisted = SessionOptionsRecord("ORT_DISABLE_ALL", {}, {"session.from_the_future": "1"})
    assert with_options(any_version, unlisted, cpu, installed="1.40.2").minimum == "1.40.2"
    own = VersionRange("1.31.1", "1.32")
    assert with_options(own, parallel, cpu, installed="1.31.1") == own
