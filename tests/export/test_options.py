"""Which recorded options Triton's backend takes, where, and why it does not take the others."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from tritonclient.grpc import model_config_pb2 as messages

from ortprep.bundle.loader_config import FirstPhase, TensorSpec, Variant
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import ExportError
from ortprep.export.model_config import build_config
from ortprep.export.options import plan_options, recorded_options
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
