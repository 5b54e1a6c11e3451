"""Which variant of a bundle a machine takes, and why the others were passed over."""

import pytest

from ortprep.bundle.loader_config import (
    ComputeCapabilityRange,
    FileEntry,
    Golden,
    LoaderConfig,
    Requirements,
    Tolerance,
    Variant,
    VersionRange,
)
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.runtime.loading.load_options import LoadOptions
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.loading.variant_selection import Machine, Selection, select_variant
from ortprep.runtime.machine.hardware import Gpu, Hardware
from ortprep.runtime.opened_model import choose_target, open_model
from tests.runtime.builders import CPU_ONLY, CUDA_NEEDED, write_bundle

pytestmark = pytest.mark.runtime

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
H200 = Gpu("H200", (9, 0), 140 * 2**30, "580.65.06", "13.0", "GPU-1")
T4 = Gpu("T4", (7, 5), 16 * 2**30, "580.65.06", "13.0", "GPU-2")
AVX2 = ("avx", "avx2", "fma")
MACHINE = Hardware("x86_64", "some processor", (*AVX2, "avx512f"), 8, 2**34)
NEEDS_CPU = Requirements(VersionRange("1.23"), (CPU,))
NEEDS_CUDA = Requirements(
    VersionRange("1.23"),
    (CUDA, CPU),
    compute_capability=ComputeCapabilityRange(minimum=(8, 0), below=(10, 0)),
)
NOTHING = "sha256:" + "0" * 64


def config_of(**requirements):
    variants = tuple(
        Variant(
            name=name,
            target=name.partition("_")[0].replace("portable", "cpu"),
            model="m.onnx",
            files=(FileEntry("m.onnx", 0, NOTHING),),
            session_options=SessionOptionsRecord("ORT_DISABLE_ALL"),
            providers=(),
            requirements=needs,
        )
        for name, needs in requirements.items()
    )
    golden = Golden(FileEntry("golden.npz", 0, NOTHING), Tolerance(0, 0))
    return LoaderConfig("1.0", "m", (), (), golden, variants)


def select(config, *, hardware=MACHINE, onnxruntime="1.31.1", providers=(CUDA, CPU), **options):
    return select_variant(config, LoadOptions(**options), Machine(hardware, onnxruntime, providers))


def chosen(config, **changes):
    variant = select(config, **changes).variant
    return None if variant is None else variant.name


def test_f13_all_reasons_of_a_variant_are_told_together():
    needs = Requirements(
        VersionRange("2.0"), (CUDA, "TensorrtExecutionProvider"), machine="aarch64", cpu_features=("sve",)
    )
    (passed_over,) = select(config_of(cuda=needs)).passed_over
    assert passed_over.reasons == (
        "expected ONNX Runtime >= 2.0, got 1.31.1",
        f"expected ONNX Runtime with TensorrtExecutionProvider, got {CUDA}, {CPU}",
        "expected a aarch64 processor, got x86_64",
        "expected a processor with sve, got one without",
        "expected CUDA device 0, got no CUDA device or driver",
    )


@pytest.mark.parametrize(
    ("minimum", "below", "version", "fits"),
    [
        ("1.23", None, "1.23.0", True),
        ("1.23.2", None, "1.23.1", False),
        ("1.9", None, "1.31.1", True),
        ("1.31", None, "1.9.0", False),
        ("1.23", "1.32", "1.31.9", True),
        ("1.23", "1.32", "1.32.0", False),
        ("1.23", "1.32.0", "1.32", False),
        ("1.23", "1.32", "1.32.0.dev20260101", False),
        ("1.31", None, "1.31.1+cu130", True),
        ("1.31.0", None, "1.31", True),
    ],
)
def test_f12_versions_are_compared_by_their_numbers(minimum, below, version, fits):
    needs = NEEDS_CPU._replace(onnxruntime=VersionRange(minimum, below))
    assert (chosen(config_of(cpu=needs), onnxruntime=version) == "cpu") is fits


def test_the_first_variant_that_fits_is_taken_and_no_later_one_judged():
    impossible = NEEDS_CPU._replace(machine="vax")
    found = select(config_of(cpu=NEEDS_CPU, portable=impossible))
    assert (found.variant.name, found.passed_over) == ("cpu", ())


def test_a_graph_for_blocks_of_one_width_is_passed_over_on_a_machine_of_another():
    wide = NEEDS_CPU._replace(cpu_features=("avx512f",))
    narrow_machine = MACHINE._replace(cpu_features=AVX2)
    config = config_of(cpu=wide, portable=NEEDS_CPU)
    assert chosen(config) == "cpu"
    assert chosen(config, hardware=narrow_machine) == "portable"
    narrow = NEEDS_CPU._replace(cpu_features=("avx2",), cpu_features_absent=("avx512f",))
    config = config_of(cpu=narrow, portable=NEEDS_CPU)
    assert chosen(config) == "portable"
    assert chosen(config, hardware=narrow_machine) == "cpu"


@pytest.mark.parametrize(
    ("capability", "fits"),
    [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 0), False), ((12, 0), False)],
)
def test_f12_compute_capabilities_are_a_half_open_range(capability, fits):
    gpu = H200._replace(compute_capability=capability)
    hardware = MACHINE._replace(gpus=(gpu,))
    assert (chosen(config_of(cuda=NEEDS_CUDA), hardware=hardware) == "cuda") is fits


@pytest.mark.parametrize(
    ("device_id", "expected"), [(None, "cuda"), (0, "cuda"), (1, "cpu"), (2, "cpu"), (-1, "cpu")]
)
def test_it_is_the_capability_of_the_asked_device_that_counts(device_id, expected):
    hardware = MACHINE._replace(gpus=(H200, T4))
    assert (
        chosen(config_of(cuda=NEEDS_CUDA, cpu=NEEDS_CPU), hardware=hardware, device_id=device_id) == expected
    )


@pytest.mark.parametrize(
    ("recorded", "device_id", "expected"),
    [("0", None, "cuda"), ("1", None, "cpu"), ("1", 0, "cuda"), ("first", None, "cpu"), ("-1", None, "cpu")],
)
def test_it_is_the_recorded_device_that_counts_where_none_is_asked_for(recorded, device_id, expected):
    config = config_of(cuda=NEEDS_CUDA, cpu=NEEDS_CPU)
    providers = (ProviderRecord(CUDA, {"device_id": recorded}), ProviderRecord(CPU))
    cuda = config.variants[0]._replace(providers=providers)
    config = config._replace(variants=(cuda, config.variants[1]))
    hardware = MACHINE._replace(gpus=(H200, T4))
    assert chosen(config, hardware=hardware, device_id=device_id) == expected


def test_a_target_restricts_the_variants_and_a_name_selects_one():
    config = config_of(cuda=NEEDS_CUDA, cpu=NEEDS_CPU, portable=NEEDS_CPU)
    assert chosen(config, target="cpu") == "cpu"
    assert chosen(config, target="portable") == "portable"
    assert chosen(config, target="cuda") is None
    assert select(config, target="rocm") == Selection(None, ())


def with_kinds(**kinds):
    """Variants for the CPU by name, with their precision."""
    config = config_of(**{f"cpu_{name}": NEEDS_CPU for name in kinds})
    variants = tuple(
        variant._replace(name=name, precision=precision)
        for variant, (name, precision) in zip(config.variants, kinds.items(), strict=True)
    )
    return config._replace(variants=variants)


def test_the_fastest_is_the_bundles_first_and_a_precision_its_first_of_that():
    config = with_kinds(int8="int8", fp32="fp32", other="fp32")
    assert chosen(config) == "int8"
    assert chosen(config, precision="fp32", target="cpu") == "fp32"
    assert select(config, precision="fp16") == Selection(None, ())


def test_a_name_and_a_precision_must_both_be_met():
    config = with_kinds(int8="int8", fp32="fp32")
    assert chosen(config, target="int8", precision="int8") == "int8"
    assert chosen(config, target="int8", precision="fp32") is None


def test_a_process_that_may_see_gpus_takes_the_first_variant_for_the_cpu(tmp_path):
    both = write_bundle(tmp_path / "both", requirements={"cuda": CUDA_NEEDED, "cpu": CPU_ONLY})
    assert choose_target(both, ModelLoadOptions(), on_gpu=False) == "cpu"
    assert choose_target(write_bundle(tmp_path / "one"), ModelLoadOptions(), on_gpu=False) is None
    assert choose_target(both, ModelLoadOptions(), on_gpu=True) is None
    assert choose_target(both, ModelLoadOptions(target="cuda"), on_gpu=False) == "cuda"
    opened = open_model(str(both), ModelLoadOptions(digests="off"))
    assert opened.variant == "cpu"
