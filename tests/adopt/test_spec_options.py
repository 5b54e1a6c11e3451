"""A spec keeps an application's options, and says which it cannot keep."""

from __future__ import annotations

from ortprep.adopt.model_use import merge_uses
from ortprep.adopt.observation import FeedRecord, ModelRecord
from ortprep.adopt.spec_options import SpecOptions, options_of
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.options import NEWEST
from ortprep.spec.validation import parse_spec

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def sections_of(
    options: SessionOptionsRecord,
    *providers: ProviderRecord,
    obtained: tuple[str, ...] = (CPU,),
    obstacle: str | None = None,
) -> SpecOptions:
    feeds = tuple(FeedRecord(runs, {"x": (runs,)}) for runs in (6, 4))
    model = ModelRecord("/m.onnx", None, 1, 1, options, providers, obtained, obstacle, {}, 2, 10, feeds)
    found = options_of(merge_uses([model]), version=NEWEST)
    spec = {"name": "m", "source": {"path": "m.onnx"}, "inputs": {"x": {"shapes": [[6], [4]]}}}
    parse_spec({**spec, **found.sections}, onnxruntime=NEWEST)
    return found


def test_what_differs_from_defaults_is_fixed_in_runtime_and_nothing_else_is() -> None:
    attributes = {"enable_cpu_mem_arena": False, "intra_op_num_threads": 2}
    options = SessionOptionsRecord("ORT_ENABLE_ALL", attributes, {"session.intra_op.allow_spinning": "0"})
    assert sections_of(options) == SpecOptions(
        {
            "targets": ["cpu"],
            "runtime": {**attributes, "session_config": {"session.intra_op.allow_spinning": "0"}},
            "tune": {"runs_per_load": 5, "shape_weights": [6, 4]},
        },
        (),
    )
    assert sections_of(SessionOptionsRecord("ORT_ENABLE_ALL")).sections.keys() == {"targets", "tune"}


def test_options_of_cuda_are_kept_without_the_device() -> None:
    cuda = ProviderRecord(CUDA, {"device_id": "1", "cudnn_conv_algo_search": "HEURISTIC"})
    found = sections_of(
        SessionOptionsRecord("ORT_ENABLE_ALL"), cuda, ProviderRecord(CPU), obtained=(CUDA, CPU)
    )
    assert found.sections["targets"] == ["cuda"]
    assert found.sections["runtime"] == {"cuda": {"cudnn_conv_algo_search": "HEURISTIC"}}


def test_what_a_spec_cannot_keep_is_said() -> None:
    options = SessionOptionsRecord(
        "ORT_DISABLE_ALL", {"enable_profiling": True}, {"session.disable_model_compile": "maybe"}
    )
    tensorrt = ProviderRecord("TensorrtExecutionProvider", {"trt_fp16_enable": "1"})
    obstacle = "the application asks for the optimisation level ORT_DISABLE_ALL"
    found = sections_of(options, tensorrt, obtained=("TensorrtExecutionProvider", CPU), obstacle=obstacle)
    assert "runtime" not in found.sections
    said = "\n".join(found.left_out)
    for word in ("enable_profiling", "session.disable_model_compile", "ORT_DISABLE_ALL", "trt_fp16_enable"):
        assert word in said
