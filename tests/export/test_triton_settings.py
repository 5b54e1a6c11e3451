"""Which options Triton's backend takes, where they go, and what is said of the rest."""

from __future__ import annotations

import dataclasses

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from hypothesis import given
from tritonclient.grpc import model_config_pb2 as messages

from ortprep.bundle.loader_config import FirstPhase, Variant
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import ExportError
from ortprep.export.option_mapping import recorded_options
from ortprep.export.triton.model_config import TritonModel, format_config, parse_config
from ortprep.export.triton.settings import plan_settings
from ortprep.export.triton.tensors import TritonTensor
from tests.export.builders import CUDA, any_variant, make_variant
from tests.export.fakes import LEVELS, cuda_options, session_options


def config_of(variant: Variant, onnxruntime: str | None = None) -> messages.ModelConfig:
    tensor = TritonTensor("x", "TYPE_FP32", (-1, 3))
    settings = plan_settings(variant, onnxruntime=onnxruntime)
    model = TritonModel("m", "model.onnx", 0, 1, (tensor,), (tensor,), settings, None)
    return text_format.Parse(format_config(model), messages.ModelConfig())


@given(any_variant)
def test_every_recorded_option_is_in_the_configuration_or_in_the_list(variant: Variant) -> None:
    settings = plan_settings(variant)
    carried = [str(one.option) for one in settings.carried]
    left_out = [one.what for one in settings.left_out]
    recorded = [str(one) for one in recorded_options(variant)]
    assert sorted(carried + left_out) == sorted(recorded)


@given(any_variant)
def test_what_is_carried_is_what_the_backend_makes_of_the_configuration(variant: Variant) -> None:
    settings = plan_settings(variant)
    config = config_of(variant)
    got = session_options(config)
    names = {one.option.name for one in settings.carried if one.option.kind == "session option"}
    for name in names - {"graph_optimization_level"}:
        expected = variant.session_options.attributes[name]
        actual = getattr(got, name)
        assert getattr(actual, "name", actual) == expected
    level = variant.session_options.graph_optimization_level
    if "graph_optimization_level" in names:
        assert got.graph_optimization_level.name == level
    given_cuda = cuda_options(config)
    for one in settings.carried:
        if one.option.kind == CUDA and one.option.name != "device_id":
            assert given_cuda[one.option.name] == one.option.value


@given(any_variant)
def test_nothing_is_in_the_configuration_that_was_not_recorded(variant: Variant) -> None:
    settings = plan_settings(variant)
    places = {one.where for one in settings.carried}
    written = {f"parameters.{key}={value}" for key, value in settings.parameters.items()}
    written |= {f"cuda.{key}={value}" for key, value in settings.cuda.items()}
    assert written <= places


@given(any_variant)
def test_the_session_that_is_tried_here_is_the_one_the_backend_makes(variant: Variant) -> None:
    settings = plan_settings(variant)
    config = config_of(variant)
    level = LEVELS.get(config.optimization.graph.level)
    assert settings.session_options.graph_optimization_level == getattr(level, "name", "ORT_ENABLE_ALL")
    for name, value in settings.session_options.attributes.items():
        actual = getattr(session_options(config), name)
        assert getattr(actual, "name", actual) == value


@pytest.mark.parametrize(
    ("level", "expected"),
    [("ORT_DISABLE_ALL", 2), ("ORT_ENABLE_BASIC", -1), ("ORT_ENABLE_EXTENDED", 1), ("ORT_ENABLE_ALL", 0)],
)
def test_a_level_is_carried_as_the_backend_numbers_it(level: str, expected: int) -> None:
    assert config_of(make_variant(level)).optimization.graph.level == expected


def test_a_level_the_backend_lacks_is_left_out_and_said() -> None:
    settings = plan_settings(make_variant("ORT_ENABLE_LAYOUT"))
    assert settings.level == 0
    assert "every optimisation" in settings.left_out[0].reason


def test_options_of_cuda_that_parameters_overrule_go_to_parameters() -> None:
    variant = make_variant(
        attributes={"intra_op_num_threads": 1},
        cuda={"cudnn_conv_algo_search": "HEURISTIC", "gpu_mem_limit": "1000", "use_tf32": "0"},
    )
    config = config_of(variant)
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert dict(accelerator.parameters) == {"use_tf32": "0"}
    assert cuda_options(config)["cudnn_conv_algo_search"] == "HEURISTIC"
    assert cuda_options(config)["gpu_mem_limit"] == "1000"


def test_an_option_the_server_s_version_lacks_is_left_out() -> None:
    variant = make_variant(cuda={"enable_cudnn": "0"})
    assert plan_settings(variant, onnxruntime="1.31.1").cuda == {"enable_cudnn": "0"}
    for version in (None, "1.28.0"):
        settings = plan_settings(variant, onnxruntime=version)
        assert settings.cuda == {}
        assert "1.30" in settings.left_out[0].reason


def test_a_recorded_cuda_graph_is_left_out() -> None:
    settings = plan_settings(make_variant(cuda={"enable_cuda_graph": "1"}))
    assert settings.cuda == {}
    assert "other memory" in settings.left_out[0].reason


def test_a_device_becomes_the_gpu_of_the_instances() -> None:
    (group,) = config_of(make_variant(cuda={"device_id": "3"})).instance_group
    assert (group.kind, list(group.gpus)) == (messages.ModelInstanceGroup.KIND_GPU, [3])


def test_another_provider_is_refused() -> None:
    variant = make_variant()
    other = dataclasses.replace(variant, providers=(ProviderRecord("QNNExecutionProvider"),))
    with pytest.raises(ExportError, match="QNNExecutionProvider"):
        plan_settings(other)


def test_a_configuration_that_is_none_is_refused_by_triton_s_parser() -> None:
    with pytest.raises(ExportError, match="no_such_field"):
        parse_config("no_such_field: 1")


def test_first_phase_and_binding_are_in_the_list() -> None:
    variant = make_variant()
    first = FirstPhase(SessionOptionsRecord("ORT_ENABLE_ALL"), variant.providers)
    settings = plan_settings(dataclasses.replace(variant, first_phase=first, io_binding=True))
    assert [one.what for one in settings.left_out] == ["first phase", "io_binding"]
