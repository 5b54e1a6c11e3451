"""What `init` proposes for a model is what it runs on, and the written spec is one the build reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from ortprep.bundle.codec import decode
from ortprep.errors import SourceError, SpecError
from ortprep.init import (
    InitResult,
    ObservedInput,
    Question,
    find_spec_name,
    init_spec,
)
from ortprep.init.graph_facts import describe_facts
from ortprep.init.input_search import Feed
from ortprep.init.naming import choose_name
from ortprep.init.trial_run import InitTrial, run_trial
from ortprep.spec.models import InputSpec
from ortprep.spec.reading import OPEN_QUESTION, read_spec
from tests import builders as models
from tests.init import builders as open_models
from tests.init.builders import FLOAT, INT64


def draft(model: onnx.ModelProto, folder: Path, **options: object) -> InitResult:
    """Drafts a spec for a model in `folder/configs`."""
    path = models.write_model(model, folder / "models" / "net.onnx")
    return init_spec(path, folder=folder / "configs", **options)  # type: ignore[arg-type]


def inputs_of(result: InitResult) -> dict[str, InputSpec]:
    return dict(result.spec.inputs)


Build = Callable[[], onnx.ModelProto]


def feeds_of(model: onnx.ModelProto, folder: Path) -> dict[str, Feed]:
    """Returns what a model runs on, found in this process, which has imported ONNX Runtime anyway."""
    path = models.write_model(model, folder / "net.onnx")
    facts = describe_facts({"model": str(path)})
    trial = decode(InitTrial, run_trial({"model": str(path), "facts": facts, "observed": {}}))
    assert trial.ran, trial.error
    return dict(trial.feeds)


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (models.conv_net, {"image": (1, 3, 16, 16)}),
        (models.two_inputs, {"left": (1, 4), "right": (1, 4)}),
        (lambda: open_models.fixed_size_classifier(96), {"image": (1, 3, 96, 96)}),
        (lambda: open_models.fixed_size_classifier(30), {"image": (1, 3, 30, 30)}),
        (lambda: open_models.skip_connection(96), {"x": (1, 1, 768, 768)}),
        (open_models.text_encoder, {"input_ids": (1, 20), "attention_mask": (1, 20)}),
        (open_models.voice_detector, {"audio": (1, 16000), "state": (2, 1, 4), "sr": ()}),
        (models.zero_inputs, {}),
    ],
)
def test_shapes_are_those_that_the_model_runs_on(
    tmp_path: Path, build: Build, shapes: dict[str, tuple[int, ...]]
) -> None:
    assert {name: feed.shape for name, feed in feeds_of(build(), tmp_path).items()} == shapes


def test_values_follow_from_how_an_input_is_used(tmp_path: Path) -> None:
    text = feeds_of(open_models.text_encoder(vocabulary=30), tmp_path)
    voice = feeds_of(open_models.voice_detector(), tmp_path)
    drawn = {name: (feed.drawn.range, feed.drawn.values) for name, feed in {**text, **voice}.items()}
    assert drawn == {
        "input_ids": ((0, 29), None),
        "attention_mask": (None, (1,)),
        "audio": ((-1, 1), None),
        "state": (None, (0,)),
        "sr": (None, (16000,)),
    }


@pytest.mark.parametrize("total", ["past_sequence_length + sequence_length", "total_sequence_length"])
def test_a_decoder_gets_its_past_and_the_next_position(tmp_path: Path, total: str) -> None:
    decoder = open_models.copies(
        input_ids=(INT64, ["batch_size", "sequence_length"]),
        attention_mask=(INT64, ["batch_size", total]),
        past_key_values__0__key=(FLOAT, ["batch_size", 2, "past_sequence_length", 4]),
    )
    shapes = {name: feed.shape for name, feed in feeds_of(decoder, tmp_path).items()}
    assert shapes == {
        "input_ids": (1, 1),
        "attention_mask": (1, 17),
        "past_key_values.0.key": (1, 2, 16, 4),
    }


def test_a_size_may_be_a_sum_of_a_total(tmp_path: Path) -> None:
    decoder = open_models.copies(
        past=(FLOAT, ["batch_size", 2, "past_sequence_length", 4]),
        input_ids=(INT64, ["batch_size", "sequence_length"]),
        attention_mask=(INT64, ["batch_size", "total_sequence_length"]),
        positions=(INT64, ["batch_size", "total_sequence_length + 1"]),
    )
    shapes = {name: feed.shape for name, feed in feeds_of(decoder, tmp_path).items()}
    assert (shapes["attention_mask"], shapes["positions"]) == ((1, 17), (1, 18))


def test_what_an_input_is_called_tells_its_values(tmp_path: Path) -> None:
    model = open_models.copies(
        features=(FLOAT, ["batch", "frames", 80]),
        lengths=(INT64, ["batch"]),
        orig_target_sizes=(INT64, ["batch", 2]),
        image=(TensorProto.UINT8, ["batch", 480, 640, 3]),
        iou_threshold=(FLOAT, []),
        use_cache_branch=(TensorProto.BOOL, [1]),
    )
    drawn = {name: (feed.drawn.range, feed.drawn.values) for name, feed in feeds_of(model, tmp_path).items()}
    assert drawn == {
        "features": ((-1, 1), None),
        "lengths": (None, (128,)),
        "orig_target_sizes": (None, (480,)),
        "image": ((0, 255), None),
        "iou_threshold": (None, (0.5,)),
        "use_cache_branch": (None, (True,)),
    }


def test_a_comparison_with_all_classes_bounds_an_input(tmp_path: Path) -> None:
    assert feeds_of(open_models.compared_one_hot(), tmp_path)["bytes"].drawn.range == (0, 256)


def test_values_are_within_narrow_types(tmp_path: Path) -> None:
    model = open_models.copies(
        x=(TensorProto.INT8, [1, 4]),
        input_ids=(TensorProto.UINT8, ["batch", "sequence"]),
        target_size=(TensorProto.UINT8, [1]),
        image=(TensorProto.UINT8, [1, 480, 640, 3]),
    )
    drawn = {name: (feed.drawn.range, feed.drawn.values) for name, feed in feeds_of(model, tmp_path).items()}
    assert drawn == {
        "x": (None, None),
        "input_ids": (None, None),
        "target_size": (None, None),
        "image": ((0, 255), None),
    }
    four_bits = feeds_of(open_models.four_bits(), tmp_path)
    assert (four_bits["x"].drawn.range, four_bits["x"].drawn.values) == (None, None)


def test_the_written_spec_reads_back_as_the_draft(tmp_path: Path) -> None:
    result = draft(open_models.renamed(models.conv_net(), "image", 'odd: "näme"\n#💥'), tmp_path)
    path = result.write()
    assert path == tmp_path / "configs" / "net.yaml"
    assert read_spec(path) == result.spec
    assert read_spec(path).source.path == "../models/net.onnx"


def test_a_spec_that_exists_is_kept(tmp_path: Path) -> None:
    result = draft(models.conv_net(), tmp_path)
    path = result.write()
    path.write_text("mine")
    with pytest.raises(SpecError, match="spec exists"):
        result.write()
    assert path.read_text() == "mine"
    assert result.write(force=True).read_text() == result.text


def test_a_model_that_does_not_run_leaves_one_question_in_its_spec(tmp_path: Path) -> None:
    result = draft(open_models.impossible(), tmp_path)
    assert result.question is not None
    assert result.question.input == "x"
    assert (1, 128) in result.question.tried
    assert "Reshape" in result.question.said
    assert "onnxruntime_src" not in result.question.said
    marked = [line for line in result.text.splitlines() if line.startswith(OPEN_QUESTION)]
    assert len(marked) == 1
    assert "which shape does input x [rows, columns] take?" in marked[0]


def test_what_the_user_answers_is_tried(tmp_path: Path) -> None:
    asked: list[Question] = []

    def answer(question: Question) -> tuple[int, ...] | None:
        asked.append(question)
        return (7, 5) if len(asked) == 1 else None

    result = draft(open_models.impossible(), tmp_path, ask=answer)
    assert [one.input for one in asked] == ["x", "x"]
    assert inputs_of(result)["x"].shapes == ((7, 5),)
    assert asked[1].tried == ((7, 5),)


def test_what_was_observed_counts_more_than_what_would_be_proposed(tmp_path: Path) -> None:
    seen = {"audio": ObservedInput(shapes=((3, 512), (1, 512)), range=(-0.5, 0.25))}
    sections = {"runtime": {"intra_op_num_threads": 1}, "targets": ["cpu"]}
    result = draft(open_models.voice_detector(), tmp_path, observed=seen, sections=sections)
    found = inputs_of(result)
    assert found["audio"] == InputSpec(shapes=((3, 512), (1, 512)), range=(-0.5, 0.25))
    assert result.spec.runtime.intra_op_num_threads == 1
    assert result.spec.targets == ("cpu",)
    assert result.text.count("targets:") == 1


def test_defaults_of_the_folder_are_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "defaults.yaml").write_text("tune: {budget_s: 7}\n")
    assert "budget_s" not in draft(models.conv_net(), tmp_path).text


def test_two_models_of_one_name_get_two_specs(tmp_path: Path) -> None:
    first, second = (tmp_path / folder / "model.onnx" for folder in ("first", "second"))
    (tmp_path / "model.yaml").write_text("name: model\nsource: {path: first/model.onnx}\n")
    assert (find_spec_name(first, tmp_path), find_spec_name(second, tmp_path)) == ("model", None)
    assert choose_name(second, tmp_path) == "second-model"
    assert choose_name(tmp_path / "ünï.onnx", tmp_path) == "uni"
    (tmp_path / "second-model.yaml").write_text("name: second-model\nsource: {demo: resnet50}\n")
    with pytest.raises(SpecError, match="no name left"):
        choose_name(second, tmp_path)


@pytest.mark.parametrize(
    "written", ["path: ~/net.onnx", "url: file://{home}/net.onnx", "path: home/net.onnx"]
)
def test_a_spec_is_found_however_it_names_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "mine.yaml").write_text(f"name: mine\nsource: {{{written.format(home=home)}}}\n")
    (tmp_path / "nobodys.yaml").write_text("name: nobodys\nsource: {path: ~nobody-here/net.onnx}\n")
    (tmp_path / "broken.yaml").write_text("name: broken\nsource: [home/net.onnx]\n")
    assert find_spec_name(home / "net.onnx", tmp_path) == "mine"


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (models.sequence_input, "not a tensor"),
        (models.unknown_operator, "No Op registered"),
        (lambda: open_models.copies(x=(FLOAT, [1, 2**40])), r"'x'.*\n.*got \[1, 1099511627776\]"),
        (open_models.copies, "model without outputs"),
        (open_models.failing_without_inputs, "does not run, and has no inputs(.|\n)*indices element"),
    ],
)
def test_a_model_that_cannot_be_prepared_is_told(tmp_path: Path, build: Build, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        draft(build(), tmp_path)


def test_an_unknown_observed_input_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such input: 'picture'"):
        draft(models.conv_net(), tmp_path, observed={"picture": ObservedInput(shapes=((1,),))})


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(SourceError, match="no such model"):
        init_spec(path)
    path.write_bytes(np.arange(99, dtype=np.uint8).tobytes())
    with pytest.raises(SourceError, match="not an ONNX model"):
        init_spec(path)
