"""Which recorded options Triton's backend takes, and what an exported variant takes and gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from tritonclient.grpc import model_config_pb2 as messages

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import (
    FileEntry,
    FirstPhase,
    Golden,
    LoaderConfig,
    TensorSpec,
    Tolerance,
    Variant,
)
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import ExportError
from ortprep.export.model_config import add_warm_up, build_config, describe_tensor, resolve_interface
from ortprep.export.options import plan_options, recorded_options
from ortprep.export.placement import TrialResult
from ortprep.export.variant_selection import ExportRequest
from tests.export.builders import any_variant, make_variant
from tests.export.fakes import LEVELS, cuda_options, session_options


def config_of(variant: Variant) -> messages.ModelConfig:
    """Returns the model configuration of a variant with one input and output."""
    tensors = (TensorSpec("x", "float32", ("n", 3)),)
    options = plan_options(variant)
    return build_config("m", "model.onnx", (tensors, tensors), options, ExportRequest())


def with_first_phase(variant: Variant) -> Variant:
    first = FirstPhase(SessionOptionsRecord("ORT_ENABLE_ALL"), variant.providers)
    return dataclasses.replace(variant, first_phase=first, io_binding=True)


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


@pytest.mark.parametrize(
    ("level", "expected"),
    [("ORT_DISABLE_ALL", 2), ("ORT_ENABLE_BASIC", -1), ("ORT_ENABLE_EXTENDED", 1), ("ORT_ENABLE_ALL", 0)],
)
def test_a_level_is_carried_as_the_backend_numbers_it(level, expected):
    assert config_of(make_variant(level)).optimization.graph.level == expected


def test_a_level_the_backend_lacks_is_left_out_and_said():
    variant = make_variant("ORT_ENABLE_LAYOUT")
    assert config_of(variant).optimization.graph.level == 0
    (reason,) = plan_options(variant).left_out.values()
    assert "every optimisation" in reason


def test_options_of_cuda_that_parameters_overrule_go_to_parameters():
    cuda = {"cudnn_conv_algo_search": "HEURISTIC", "gpu_mem_limit": "1000", "use_tf32": "0"}
    config = config_of(make_variant(attributes={"intra_op_num_threads": 1}, cuda=cuda))
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert dict(accelerator.parameters) == {"use_tf32": "0"}
    assert cuda_options(config)["cudnn_conv_algo_search"] == "HEURISTIC"
    assert cuda_options(config)["gpu_mem_limit"] == "1000"


def test_a_cuda_option_the_server_s_version_lacks_and_a_cuda_graph_are_left_out():
    variant = make_variant(cuda={"enable_cudnn": "0"})
    assert plan_options(variant, onnxruntime="1.31.1").section("cuda") == {"enable_cudnn": "0"}
    graph = make_variant(cuda={"enable_cuda_graph": "1"})
    for one, version, expected in (
        (variant, None, "1.30"),
        (variant, "1.28.0", "1.30"),
        (graph, "1.31.1", "other memory"),
    ):
        options = plan_options(one, onnxruntime=version)
        assert options.section("cuda") == {}
        (reason,) = options.left_out.values()
        assert expected in reason


def test_a_device_becomes_the_gpu_of_the_instances():
    (group,) = config_of(make_variant(cuda={"device_id": "3"})).instance_group
    assert (group.kind, list(group.gpus)) == (messages.ModelInstanceGroup.KIND_GPU, [3])


def test_triton_refuses_another_provider():
    other = dataclasses.replace(make_variant(), providers=(ProviderRecord("QNNExecutionProvider"),))
    with pytest.raises(ExportError, match="QNNExecutionProvider"):
        plan_options(other)


def test_first_phase_and_binding_are_in_the_list():
    variant = with_first_phase(make_variant())
    assert [*plan_options(variant).left_out] == ["first phase", "io_binding"]


ABSENT = TrialResult(missing=("expected a GPU",))
CONFIG = LoaderConfig(
    "1.2",
    "net",
    inputs=(TensorSpec("x", "float32", ("batch", None, 3)), TensorSpec("ids", "int64", ("batch",))),
    outputs=(TensorSpec("y", "float32", ("batch", "n")), TensorSpec("z", "float32", None)),
    golden=Golden(FileEntry("golden.npz", 1, digest_bytes(b"g")), Tolerance(0, 0)),
    variants=(make_variant(),),
)


def test_without_a_session_sizes_are_those_the_variant_is_bound_to():
    variant = dataclasses.replace(make_variant(), binding={"batch": 4, "x[1]": 7})
    inputs, outputs = resolve_interface(CONFIG, variant, ABSENT, {})
    assert [one.shape for one in (*inputs, *outputs)] == [(4, 7, 3), (4,), (4, "n"), None]


def test_a_session_has_the_last_word():
    said = (TensorSpec("x", "float16", (1, 2)),)
    assert resolve_interface(CONFIG, make_variant(), TrialResult((), said, said), {}) == (said, said)


def test_an_unknown_rank_is_not_taken_for_a_scalar():
    trial = TrialResult((), (TensorSpec("x", "float32", ()),), (TensorSpec("y", "float32", ()),))
    inputs, outputs = resolve_interface(CONFIG, make_variant(), trial, {"x": (), "y": (2, 2)})
    assert (inputs[0].shape, outputs[0].shape) == ((), None)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (TensorSpec("x", "float8e4m3fn", (1,)), "float8e4m3fn"),
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


def test_a_sample_that_is_no_batch_makes_no_warm_up():
    config = messages.ModelConfig(max_batch_size=4)
    for name in ("x", "y"):
        describe_tensor(config.input.add(), TensorSpec(name, "float32", ("b", 2)), batched=True)
    feeds = {"x": np.ones((2, 2), np.float32), "y": np.ones((3, 2), np.float32)}
    assert add_warm_up(config, feeds) == "the inputs of the golden sample are not of one batch size"
    assert add_warm_up(config, {"x": feeds["x"]}) == "the golden sample has no y"
    assert not config.model_warmup
