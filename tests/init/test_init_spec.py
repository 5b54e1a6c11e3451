"""What `init` proposes for a model is what it runs on, and the written spec is one the build reads."""

import numpy as np
import pytest

from ortprep.errors import SourceError, SpecError
from ortprep.init import ObservedInput, find_spec_name, init_spec
from ortprep.init.draft import choose_name
from ortprep.init.trial_run import run_trial
from ortprep.spec.models import InputSpec, ModelSpec
from ortprep.spec.reading import OPEN_QUESTION, read_spec
from ortprep.stages.core.spec_fit import require_fit, shape_sets
from ortprep.stages.fetch.inspection import inspect_model
from tests import builders as models
from tests.init import builders as open_models
from tests.init.builders import copies, map_classifier


def draft(model, folder, **options):
    """Drafts a spec for a model in `folder/configs`."""
    path = models.write_model(model, folder / "models" / "net.onnx")
    return init_spec(path, folder=folder / "configs", **options)


def feeds_of(model, folder):
    """Returns what a model runs on, found in this process, which has imported ONNX Runtime anyway."""
    path = models.write_model(model, folder / "net.onnx")
    trial = run_trial((path, None, {}))
    assert not trial.error, trial.error
    return dict(trial.feeds)


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (models.conv_net, {"image": (1, 3, 16, 16)}),
        (models.two_inputs, {"left": (1, 4), "right": (1, 4)}),
        (lambda: open_models.fixed_size_classifier(96), {"image": (1, 3, 96, 96)}),
        (lambda: open_models.fixed_size_classifier(62), {"image": (1, 3, 62, 62)}),
        (lambda: open_models.skip_connection(96), {"x": (1, 1, 384, 384)}),
        (open_models.text_encoder, {"input_ids": (1, 20), "attention_mask": (1, 20)}),
        (open_models.voice_detector, {"audio": (1, 16000), "state": (2, 1, 4), "sr": ()}),
        (models.zero_inputs, {}),
    ],
)
def test_shapes_are_those_that_the_model_runs_on(tmp_path, build, shapes):
    assert {name: feed.shape for name, feed in feeds_of(build(), tmp_path).items()} == shapes


@pytest.mark.parametrize("total", ["past_sequence_length + sequence_length", "total_sequence_length"])
def test_a_decoder_gets_its_past_and_the_next_position(tmp_path, total):
    decoder = copies(
        "int64[batch_size, sequence_length] input_ids",
        "int64[batch_size, TOTAL] attention_mask",
        "int64[batch_size, LATER] positions",
        "float[batch_size, 2, past_sequence_length, 4] past_key_values_0_key",
    )
    for item in (*decoder.graph.input, *decoder.graph.output):
        for axis in item.type.tensor_type.shape.dim:
            if axis.dim_param in ("TOTAL", "LATER"):
                is_sum = "+" in total or axis.dim_param == "TOTAL"
                axis.dim_param = total if is_sum else f"{total} + 1"
    shapes = {name: feed.shape for name, feed in feeds_of(decoder, tmp_path).items()}
    assert shapes == {
        "input_ids": (1, 1),
        "attention_mask": (1, 17),
        "positions": (1, 17 if "+" in total else 18),
        "past_key_values_0_key": (1, 2, 16, 4),
    }


@pytest.mark.parametrize(
    ("build", "fed"),
    [
        (open_models.text_encoder, {"input_ids": (0, 29), "attention_mask": {1}}),
        (open_models.voice_detector, {"audio": (-1, 1), "state": {0}, "sr": {16_000}}),
        (open_models.compared_one_hot, {"bytes": (0, 256)}),
        (open_models.scaled_pixels, {"image": (0, 255)}),
        (
            lambda: copies(
                "float[batch, frames, 80] features",
                "int64[batch] lengths",
                "int64[batch, 2] orig_target_sizes",
                "uint8[batch, 480, 640, 3] image",
                "float iou_threshold",
                "bool[1] use_cache_branch",
            ),
            {
                "features": (-1, 1),
                "lengths": {128},
                "orig_target_sizes": {480},
                "image": (0, 255),
                "iou_threshold": {0.5},
                "use_cache_branch": {True},
            },
        ),
        (  # Values are within narrow types.
            lambda: copies("int8[1, 4] x", "uint8[batch, sequence] ids", "uint8[1] target_size"),
            {"x": None, "ids": None, "target_size": None},
        ),
    ],
)
def test_values_follow_from_what_an_input_is(tmp_path, build, fed):
    values = {name: feed.values for name, feed in feeds_of(build(), tmp_path).items()}
    assert {name: one.range or (one.values and set(one.values)) for name, one in values.items()} == fed


def test_the_written_spec_reads_back_as_the_draft_and_is_kept(tmp_path):
    model = models.conv_net()
    model.graph.input[0].name = model.graph.node[0].input[0] = 'odd: "näme"\n#💥'
    result = draft(model, tmp_path)
    path = result.write()
    assert path == tmp_path / "configs" / "net.yaml"
    assert read_spec(path) == result.spec
    assert read_spec(path).source.path == "../models/net.onnx"
    path.write_text("mine")
    with pytest.raises(SpecError, match="spec exists"):
        result.write()
    assert path.read_text() == "mine"
    assert result.write(force=True).read_text() == result.text


def test_a_model_that_does_not_run_leaves_one_question_in_its_spec(tmp_path):
    result = draft(open_models.impossible(), tmp_path)
    for said in ("which shape does input x [rows, columns] take? Tried ", "[1, 128]", "Reshape"):
        assert said in result.question
    assert "onnxruntime_src" not in result.question
    marked = [line for line in result.text.splitlines() if line.startswith(OPEN_QUESTION)]
    assert marked == [f"{OPEN_QUESTION} {result.question}"]


def test_what_is_known_counts_more_than_what_would_be_proposed(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "defaults.yaml").write_text("tune: {budget_s: 7}\n")
    seen = {"audio": ObservedInput(shapes=((3, 512), (1, 512)), range=(-0.5, 0.25))}
    sections = {"runtime": {"intra_op_num_threads": 1}, "targets": ["cpu"]}
    result = draft(open_models.voice_detector(), tmp_path, observed=seen, sections=sections)
    assert result.spec.inputs["audio"] == InputSpec(shapes=((3, 512), (1, 512)), range=(-0.5, 0.25))
    assert result.spec.runtime.intra_op_num_threads == 1
    assert result.spec.targets == ("cpu",)
    assert result.text.count("targets:") == 1
    assert "budget_s" not in result.text


def test_two_models_of_one_name_get_two_specs(tmp_path):
    first, second = (tmp_path / folder / "model.onnx" for folder in ("first", "second"))
    (tmp_path / "model.yaml").write_text("name: model\nsource: {path: first/model.onnx}\n")
    assert (find_spec_name(first, tmp_path), find_spec_name(second, tmp_path)) == ("model", None)
    assert choose_name(second, tmp_path) == "second-model"
    assert choose_name(tmp_path / "ünï.onnx", tmp_path) == "uni"
    (tmp_path / "second-model.yaml").write_text("name: second-model\nsource: {path: resnet50.onnx}\n")
    with pytest.raises(SpecError, match="no name left"):
        choose_name(second, tmp_path)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (models.sequence_input, "expected a tensor"),
        (models.unknown_operator, "No Op registered"),
        (lambda: copies(f"float[1, {2**40}] x"), r"'x'.*got 1099511627776"),
        (copies, "model without outputs"),
        (
            lambda: models.parse(
                "() => (float[1] y) <float[2] table = {0, 0}, int64[1] row = {9}> { y = Gather(table, row) }"
            ),
            "does not run, and has no inputs(.|\n)*indices element",
        ),
    ],
)
def test_a_model_that_cannot_be_prepared_is_told(tmp_path, build, said):
    with pytest.raises(SourceError, match=said):
        draft(build(), tmp_path)


def test_what_is_no_model_and_an_unknown_observed_input_are_told(tmp_path):
    path = tmp_path / "net.onnx"
    with pytest.raises(SourceError, match="no such model"):
        init_spec(path)
    path.write_bytes(np.arange(99, dtype=np.uint8).tobytes())
    with pytest.raises(SourceError, match="not an ONNX model"):
        init_spec(path)
    with pytest.raises(SpecError, match=r"unknown input of .*: 'picture'"):
        draft(models.conv_net(), tmp_path, observed={"picture": ObservedInput(shapes=((1,),))})


# -- dimensions that only say that a size is not known are independent


NAMELESS = ["", "?", "-1", "unk__6", "DynamicDimension.0", "p2o.DynamicDimension.0"]


def unrelated_net(written):
    """`left` [?, 4] and `right` [?, 4]: their sizes have nothing in common."""
    model = copies("float[n, 4] left", "float[n, 4] right")
    for item in (*model.graph.input, *model.graph.output):
        item.type.tensor_type.shape.dim[0].dim_param = written
    return model


@pytest.mark.parametrize("written", NAMELESS)
def test_what_says_nothing_is_no_name_and_gets_sizes_of_its_own(tmp_path, written):
    path = models.write_model(unrelated_net(written), tmp_path / "m.onnx")
    interface = inspect_model((str(path), "m")).interface
    assert [item.shape for item in interface.inputs] == [(None, 4), (None, 4)]
    inputs = {"left": {"shapes": [[3, 4]]}, "right": {"shapes": [[5, 4]]}}
    spec = ModelSpec.model_validate({"name": "m", "source": {"path": "m.onnx"}, "inputs": inputs})
    require_fit(spec, interface)
    assert shape_sets(spec, interface) == ({"left": (3, 4), "right": (5, 4)},)


# -- the bundle of a classifier that answers with a list of maps answers with a matrix


def test_a_classifier_that_makes_maps_is_prepared_without_them(tmp_path):
    path = models.write_model(map_classifier(), tmp_path / "net.onnx")
    result = init_spec(path, folder=tmp_path / "configs", may_drop_zip_map=True)
    spec = read_spec(result.write())
    assert (spec.source.path, spec.source.drop_zip_map) == ("../net.onnx", True)
    assert find_spec_name(path, tmp_path / "configs") == spec.name == "net"
    assert "a matrix with a column per class (no, yes)" in result.text.replace("\n# ", " ")
