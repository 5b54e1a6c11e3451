import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.loader_config import ComputeCapabilityRange, Requirements, VersionRange
from ortprep.bundle.model_facts import ModelFacts, ModelInterface
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.runtime.machine.hardware import Gpu, Hardware
from ortprep.spec.models import RuntimeSpec
from ortprep.stages.optimize.graph_writer import SaveResult
from ortprep.stages.optimize.requirements import (
    derive_requirements,
    find_integer_type,
    readable_versions,
    with_options,
)
from ortprep.stages.optimize.session_plans import loading_providers, plan_steps

AVX2 = Hardware("x86_64", "Haswell", ("avx", "avx2", "fma"), cores=2, memory_bytes=2**30)
AVX512 = Hardware("x86_64", "Icelake", ("avx", "avx2", "avx512f", "fma"), cores=2, memory_bytes=2**30)
ARM = Hardware("aarch64", "Neoverse", ("asimd",), cores=2, memory_bytes=2**30)
HOPPER = Gpu("H200", (9, 0), 2**37, "580.1", "13.0", "GPU-1")
AMPERE = Gpu("A10", (8, 6), 2**34, "580.1", "13.0", "GPU-2")
BLOCKED = ("", "com.microsoft.nchwc")


PLAIN, ON_CPU = SessionOptionsRecord("ORT_DISABLE_ALL"), (ProviderRecord("CPUExecutionProvider"),)


def saved(*domains, opset=17, ir_version=8, onnxruntime="1.31.1"):
    operators = {f"{domain}.Relu" if domain else "Relu": 1 for domain in domains}
    interface = ModelInterface((), (), {}, external=False)
    facts = ModelFacts(interface, {"": opset}, ir_version, operators, 0, {})
    return SaveResult(facts, (), onnxruntime)


def derive(hardware, domains=("",), *, device_id=None):
    gpu = (ProviderRecord("CUDAExecutionProvider", {"device_id": str(device_id)}),)
    providers = ON_CPU if device_id is None else gpu
    return derive_requirements(saved(*domains), PLAIN, providers, portable=False, hardware=hardware)


def test_a_graph_of_onnx_operators_needs_no_particular_machine():
    assert derive(AVX512) == Requirements(VersionRange("1.23"), ("CPUExecutionProvider",))


@pytest.mark.parametrize(
    ("hardware", "needs"),
    [
        (AVX512, ("x86_64", ("avx2", "avx512f", "fma"), ())),  # blocks of 16
        (AVX2, ("x86_64", ("avx",), ("avx512f",))),  # blocks of 8
        (ARM, ("aarch64", (), ())),  # blocks of 16, without flags of x86
    ],
    ids=["AVX-512", "AVX2", "Arm"],
)
def test_a_blocked_layout_needs_a_machine_with_blocks_of_that_size(hardware, needs):
    found = derive(hardware, BLOCKED)
    assert (found.machine, found.cpu_features, found.cpu_features_absent) == needs


def test_a_gpu_of_the_next_major_compute_capability_is_another_machine():
    hardware = Hardware("x86_64", "", (), cores=2, memory_bytes=2**30, gpus=(HOPPER, AMPERE))
    assert derive(hardware, device_id=0).compute_capability == ComputeCapabilityRange((9, 0), (10, 0))
    assert derive(hardware, device_id=1).compute_capability == ComputeCapabilityRange((8, 6), (9, 0))


def test_f11_operators_of_onnx_runtime_bind_to_its_minor_version_unless_the_source_brought_them():
    written = saved("", "com.microsoft")
    assert readable_versions(written, portable=False) == VersionRange("1.31", "1.32")
    assert readable_versions(written, portable=True) == VersionRange("1.31")


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
    own = VersionRange("1.31.1", "1.32")
    assert with_options(own, parallel, cpu, installed="1.31.1") == own


def test_cuda_options_are_for_the_cuda_variant_alone():
    runtime = RuntimeSpec(cuda={"use_tf32": 0})
    assert loading_providers(runtime, "cuda") == (
        ProviderRecord(CUDA, {"use_tf32": "0"}),
        ProviderRecord(CPU),
    )
    for variant in ("cpu", "portable"):
        assert loading_providers(runtime, variant) == (ProviderRecord(CPU),)


def test_cpu_is_not_named_where_the_user_forbids_it():
    runtime = RuntimeSpec(session_config={"session.disable_cpu_ep_fallback": "1"})
    assert [provider.name for provider in loading_providers(runtime, "cuda")] == [CUDA]


# The ladder

VARIANTS = st.sampled_from(["cpu", "cuda", "portable"])
LEVELS = st.sampled_from(["all", "extended", "basic"])


def test_the_whole_ladder_goes_from_everything_to_the_source():
    assert [step.name for step in plan_steps("cpu", level="all")] == ["all", "extended", "basic", "source"]


@given(level=LEVELS)
def test_loads_optimise_the_portable_variant_as_far_as_the_user_lets_them_and_else_the_source_alone(level):
    steps = plan_steps("portable", level=level)
    assert [step.level for step in steps] == ["ORT_ENABLE_BASIC", "ORT_ENABLE_BASIC", None]
    loading = [step.loading_level for step in steps]
    assert loading == [f"ORT_ENABLE_{level.upper()}", "ORT_DISABLE_ALL", "ORT_ENABLE_ALL"]
    for variant in ("cpu", "cuda"):
        *written, source = plan_steps(variant, level=level)
        assert {step.loading_level for step in written} == {"ORT_DISABLE_ALL"}
        assert source.loading_level == "ORT_ENABLE_ALL"


@given(variant=VARIANTS, level=LEVELS)
def test_no_step_is_tried_twice_and_the_source_comes_last(variant, level):
    steps = plan_steps(variant, level=level)
    assert [step.level is None for step in steps] == [False] * (len(steps) - 1) + [True]
    tried = [(step.level, step.loading_level) for step in steps]
    assert len(set(tried)) == len(tried)
