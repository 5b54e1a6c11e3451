"""Which variants are exported, and with which of their recorded options."""

import pytest
from hypothesis import given
from tritonclient.grpc import model_config_pb2 as messages
from typer.testing import CliRunner

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import (
    FileEntry,
    Golden,
    LoaderConfig,
    Requirements,
    TensorSpec,
    Tolerance,
    VersionRange,
)
from ortprep.bundle.session_record import ProviderRecord
from ortprep.cli import serving_commands  # noqa: F401  puts the commands on the app
from ortprep.cli.command import app
from ortprep.errors import ExportError
from ortprep.export.model_config import build_config, describe_tensor
from ortprep.export.options import plan_options, recorded_options
from ortprep.export.repository import choose_variants
from tests.export.builders import CPU, CUDA, any_variant, make_variant
from tests.export.fakes import LEVELS, cuda_options, load_model, session_options
from tests.registry.builders import on_gpu
from tests.runtime.builders import write_bundle
from tests.runtime.pool.builders import write_doubling

OWN = VersionRange("1.31", "1.32")
AVX512 = Requirements(OWN, (CPU,), "x86_64", ("avx512f",), ("amx_tile",))
ANYWHERE = Requirements(VersionRange("1.23"), (CPU,))


def variant(name, needs, **changes):
    made = make_variant(cuda={} if CUDA in needs.providers else None)
    return made._replace(name=name, requirements=needs, **changes)


def bundle(*variants):
    golden = Golden(FileEntry("golden.npz", 1, digest_bytes(b"g")), Tolerance(0, 0))
    return LoaderConfig("1.2", "net", (), (), golden, variants)


ALL = bundle(
    variant("cuda", on_gpu(9, 0)),
    variant("cpu-int8", AVX512, precision="int8"),
    variant("cpu", AVX512),
    variant("portable", ANYWHERE),
)


def test_the_first_that_runs_anywhere_is_taken_unless_others_are_named():
    assert [one.name for one in choose_variants(ALL, ())] == ["portable"]
    assert [one.name for one in choose_variants(ALL, ("cpu-int8", "cpu"))] == ["cpu-int8", "cpu"]
    with pytest.raises(ExportError, match="no variant of net runs on every server"):
        choose_variants(bundle(variant("cuda", on_gpu(9, 0)), variant("cpu", AVX512)), ())


def test_an_unknown_name_is_told_with_those_there_are():
    with pytest.raises(ExportError, match="expected one of cuda, cpu-int8, cpu, portable"):
        choose_variants(ALL, ("gpu",))


# -- which recorded options Triton's backend takes, and what an exported variant takes and gives


def config_of(variant):
    """Returns the model configuration of a variant with one input and output."""
    tensors = (TensorSpec("x", "float32", ("n", 3)),)
    options = plan_options(variant)
    return build_config("m", "model.onnx", (tensors, tensors), options)


@given(any_variant)
def test_every_recorded_option_is_in_the_export_or_in_the_list(variant):
    options = plan_options(variant)
    recorded = sorted(map(str, recorded_options(variant)))
    assert sorted([*map(str, options.places), *options.left_out]) == recorded


@given(any_variant)
def test_what_is_carried_is_what_triton_s_backend_makes_of_the_configuration(variant):
    options, config = plan_options(variant), config_of(variant)
    session = session_options(config)
    for name, value in options.session_options.attributes.items():
        actual = getattr(session, name)
        assert getattr(actual, "name", actual) == value == variant.session_options.attributes[name]
    level = LEVELS.get(config.optimization.graph.level)
    assert options.session_options.graph_optimization_level == getattr(level, "name", "ORT_ENABLE_ALL")
    given_cuda = cuda_options(config)
    for name, text in options.providers[0].options.items():
        if name != "device_id":
            assert given_cuda[name] == text


def test_a_cuda_option_that_a_version_lacks_is_left_out():
    made = make_variant(cuda={"enable_cudnn": "0"})
    newer = made._replace(requirements=Requirements(OWN, (CUDA, CPU)))
    assert plan_options(newer).section("cuda") == {"enable_cudnn": "0"}
    options = plan_options(made)
    assert options.section("cuda") == {}
    assert options.left_out == ("CUDAExecutionProvider enable_cudnn=0",)


def test_a_device_becomes_the_gpu_of_the_instances():
    (group,) = config_of(make_variant(cuda={"device_id": "3"})).instance_group
    assert (group.kind, list(group.gpus)) == (messages.ModelInstanceGroup.KIND_GPU, [3])


def test_triton_refuses_another_provider():
    other = make_variant()._replace(providers=(ProviderRecord("QNNExecutionProvider"),))
    with pytest.raises(ExportError, match="QNNExecutionProvider"):
        plan_options(other)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (TensorSpec("x", "complex64", (1,)), "complex64"),
        (TensorSpec("x", "seq(tensor(float))", ()), "seq"),
        (TensorSpec("x", "float32", None), "number of axes"),
        (TensorSpec("x", "float32", (0, 3)), "sizes of 1 and more"),
    ],
)
def test_what_triton_has_no_word_for_is_refused(spec, expected):
    with pytest.raises(ExportError, match=expected):
        describe_tensor(messages.ModelInput(), spec, batched=False)


def test_a_scalar_per_row_is_reshaped():
    tensor = messages.ModelInput()
    describe_tensor(tensor, TensorSpec("x", "float32", ("batch",)), batched=True)
    assert (list(tensor.dims), tensor.HasField("reshape")) == ([1], True)


# -- `ortprep export`: what it writes to stdout, and what becomes of mistakes


def call(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture
def bundles(tmp_path):
    return write_bundle(tmp_path / "linear"), write_doubling(tmp_path / "double")


def test_triton_writes_a_model_per_bundle_and_lists_them(bundles, tmp_path):
    ended = call("triton", *bundles, "--out", tmp_path / "repository")
    assert ended.exit_code == 0
    assert "linear: variant cpu of linear" in ended.stdout
    assert [load_model(tmp_path / "repository" / name) for name in ("linear", "double")]
