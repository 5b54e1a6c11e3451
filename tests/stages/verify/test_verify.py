"""Verification lets no wrong answer through, and says which one it was."""

import json
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.loader_config import (
    FileEntry,
    Golden,
    Requirements,
    TensorSpec,
    Tolerance,
    Variant,
    VersionRange,
)
from ortprep.bundle.manifest import SourceRecord
from ortprep.bundle.model_facts import ModelInterface
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.children import answers
from ortprep.children.answers import Answer
from ortprep.errors import SourceError, SpecError, StageError, VerificationError
from ortprep.runtime.loading.golden import read_golden
from ortprep.runtime.loading.session import CPU
from ortprep.runtime.tensors.arrays import read_tensors, write_tensors
from ortprep.spec.models import ModelSpec
from ortprep.stages.core import samples
from ortprep.stages.core.contract import Context, Plan, TaskId, Upstream
from ortprep.stages.core.results import FetchResult, PreparedResult, VerifyResult
from ortprep.stages.verify import golden_sample, reference
from ortprep.stages.verify.stage import VerifyStage
from tests import builders as models
from tests.stages.fetch.fakes import run_here


class Build:
    """A source and a candidate on disk, and what verifying one against the other comes to."""

    def __init__(self, root):
        self.root = root
        self.said = []
        self.folder = root / "verify"

    def verify(self, source, candidate=None, **spec):
        models.write_external_model(source, self.root / "fetch" / "model.onnx")
        if candidate is not None:
            models.write_external_model(candidate, self.candidate)
        return self.verify_files(source, **spec)

    @property
    def candidate(self):
        return self.root / "optimize" / "model.onnx"

    def verify_files(self, source, *, step="all", **spec):
        if not self.candidate.exists():
            models.write_external_model(source, self.candidate)
        self.folder.mkdir()
        return self._run(self._context(source, step, spec))

    def verify_portable(self, source, **spec):
        """Verifies the same file as the portable variant, as the graph would afterwards."""
        moved = self.folder.rename(self.root / "verify-cpu")
        folder = self.root / "verify-portable"
        folder.mkdir()
        context = self._context(source, "basic", spec)
        upstream = {
            TaskId("fetch"): context.upstream[TaskId("fetch")],
            TaskId("optimize", "portable"): context.upstream[TaskId("optimize", "cpu")],
            TaskId("verify", "cpu"): Upstream(moved, {}),
        }
        assert upstream.keys() == set(VerifyStage().requires(context.plan, "portable"))
        return self._run(replace(context, variant="portable", upstream=upstream, folder=folder))

    def _run(self, context):
        result = VerifyStage().run(context)
        return decode(VerifyResult, json.loads(json.dumps(result, allow_nan=False)))

    def _context(self, source, step, spec):
        model = ModelSpec.model_validate({"name": "m", "source": {"path": "model.onnx"}, **spec})
        fetched = FetchResult(
            "model.onnx", SourceRecord("path", "", "", (), {}, 8, {}, 0), interface_of(source)
        )
        needs = Requirements(VersionRange("1.23"), (CPU,))
        options, providers = SessionOptionsRecord("ORT_DISABLE_ALL"), (ProviderRecord(CPU),)
        variant = Variant("cpu", "cpu", "model.onnx", (), options, providers, needs)
        optimized = PreparedResult(variant, step, (), "1.31.1")
        plan = Plan(model.located_in(self.root), ("cpu",))
        return Context(
            plan=plan,
            variant="cpu",
            upstream={
                TaskId("fetch"): Upstream(self.root / "fetch", encode(fetched)),
                TaskId("optimize", "cpu"): Upstream(self.root / "optimize", encode(optimized)),
            },
            folder=self.folder,
            say=self.said.append,
            key=VerifyStage().key(plan, "cpu"),
        )


@pytest.fixture
def build_in_children(tmp_path):
    return Build(tmp_path)


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Does the children's work in this process: what is compared is the same, without their starting."""
    for module in (answers, samples):
        monkeypatch.setattr(module, "run_child", run_here)
    return Build(tmp_path)


def interface_of(model):
    def describe(value):
        kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
        dims = value.type.tensor_type.shape.dim
        shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims)
        return TensorSpec(value.name, {"float": "float32"}.get(kind, kind), shape)

    inputs, outputs = (tuple(map(describe, values)) for values in (model.graph.input, model.graph.output))
    return ModelInterface(inputs, outputs, {"ids": 11}, external=True)


IMAGE = {"inputs": {"image": {"shapes": [[2, 3, 16, 16], [1, 3, 16, 16]]}}}
LEFT = {"inputs": {"left": {"shapes": [[2, 4], [3, 4]]}}}


def changed(model, edit):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    edit(copy.graph)
    return copy


def test_a_source_that_was_only_copied_is_equal_in_every_sample(build_in_children):
    build = build_in_children
    record = build.verify(models.conv_net(), **IMAGE).record
    assert (record.samples, record.inputs) == (2, "seeded")
    assert [error.output for error in record.errors] == ["scores"]
    assert record.errors[0].max_abs < 1e-6
    assert 0 < record.errors[0].worst_expected < 1
    assert record.noise_floor[0].ratio < 1
    names = {path.name for path in build.folder.iterdir()}
    assert names == {"golden.npz", "reference", "reference.json", "samples"}
    golden = read_tensors(build.folder / "golden.npz")
    shapes = {name: array.shape for name, array in golden.items()}
    assert shapes == {"input:image": (1, 3, 16, 16), "output:scores": (1, 10)}, "the smallest sample"
    assert read_tensors(build.folder / "samples" / "0.npz")["image"].shape == (2, 3, 16, 16)


def test_the_source_is_asked_once_for_all_variants(build):
    source = two_outputs()
    first = build.verify(source, **LEFT)
    build.said.clear()
    second = build.verify_portable(source, **LEFT)
    assert second.record == first.record
    assert build.said == ["source on CPU: reusing the answers for verify/cpu", "prepared model (basic)"]
    assert list((build.root / "verify-portable").iterdir()) == []
    (build.root / "verify-portable").rmdir()
    (build.root / "verify-cpu").rename(build.folder)
    broken = changed(source, lambda graph: set_weight(graph.initializer[1], 7.0))
    models.write_external_model(broken, build.candidate)
    with pytest.raises(VerificationError, match="m/portable"):
        build.verify_portable(source, **LEFT)


def test_one_perturbed_weight_fails_with_the_element_located(build):
    model = models.two_inputs()
    models.write_external_model(model, build.candidate)
    weights = build.candidate.parent / "weights.bin"
    values = np.fromfile(weights, np.float32)
    values[4 + 5 * 2] += 0.5  # row 2, column 4 of a 4 × 5 matrix: only column 4 of the product moves
    values.tofile(weights)
    with pytest.raises(VerificationError) as caught:
        build.verify(model, inputs={"left": {"shapes": [[1, 4]]}})
    parts = (
        "m/cpu",
        "'total' of sample left=[1, 4] right=[1, 4]",
        "at [0, 4]",
        "1 of its 5 elements",
        "1 of 1 outputs",
        "noise floor",
    )
    assert [part for part in parts if part not in caught.value.message] == []
    assert "level: extended" in str(caught.value.hint)
    assert not list(build.folder.glob("answers*"))


def to_half(graph):
    graph.node.append(onnx.helper.make_node("Cast", ["second"], ["half"], to=onnx.TensorProto.FLOAT16))
    graph.output[1].CopyFrom(models.value("half", onnx.TensorProto.FLOAT16, ["batch", 3]))
    rename(graph, {"second": "inner", "half": "second"})


WRONG = {
    "NaN in a weight": (
        lambda graph: set_weight(graph.initializer[1], np.nan),
        r"output 'second'.*NaN mask.*1 of 2 outputs \(second\)",
    ),
    "another type": (to_half, r"outputs differ.*got first float32, second float16"),
    "another name": (lambda graph: rename(graph, {"second": "other"}), "outputs differ from its source's"),
    "another order": (lambda graph: graph.output.reverse(), "outputs differ from its source's"),
    "another input": (
        lambda graph: graph.input.append(models.value("more", onnx.TensorProto.FLOAT, [1])),
        "does not run: m/cpu",
    ),
    "weights that do not fit": (
        lambda graph: graph.initializer[0].CopyFrom(models.tensor("a", np.zeros((3, 5), np.float32))),
        "does not run: m/cpu",
    ),
}


@pytest.mark.parametrize(("edit", "message"), WRONG.values(), ids=WRONG)
def test_whatever_is_wrong_with_a_candidate_is_told(build, edit, message):
    source = two_outputs()
    with pytest.raises(VerificationError, match=f"(?s){message}"):
        build.verify(source, changed(source, edit), **LEFT)


def test_a_source_that_does_not_run_is_not_blamed_on_the_candidate(build):
    with pytest.raises(StageError, match="source does not run") as caught:
        build.verify(models.unknown_operator(), inputs={"x": {"shapes": [[1, 4]]}})
    assert not isinstance(caught.value, VerificationError)


def test_a_random_model_is_called_random(build_in_children):
    model = models.parse("() => (float[8] y) { y = RandomNormal <shape = [8]> () }")
    with pytest.raises(VerificationError, match="different answers each time") as caught:
        build_in_children.verify(model)
    assert "seed" in str(caught.value.hint)


@pytest.mark.parametrize("is_noise", [True, False])
def test_a_tolerance_below_the_noise_floor_is_called_too_tight_for_noise_alone(build, is_noise):
    source = normalized_conv()
    if is_noise:
        optimise(models.write_model(source, build.root / "inline.onnx"), build.candidate)
    else:
        broken = changed(source, lambda graph: set_weight(graph.initializer[0], 7.0))
        models.write_external_model(broken, build.candidate)
    with pytest.raises(VerificationError) as caught:
        build.verify(source, verify={"rtol": 0, "atol": 1e-13}, **IMAGE)
    expected = "is outside this tolerance too" if is_noise else "optimise less"
    assert expected in str(caught.value.hint)


@pytest.mark.parametrize("is_noise", [True, False])
def test_twice_the_noise_floor_is_tolerated_unless_the_spec_sets_a_tolerance(build, is_noise):
    source = changed(normalized_conv(), lambda graph: set_weights(graph.initializer[0], 1e4))
    if is_noise:
        optimise(models.write_model(source, build.root / "inline.onnx"), build.candidate)
    else:
        broken = changed(source, lambda graph: set_weight(graph.initializer[0], 7.0))
        models.write_external_model(broken, build.candidate)
    many = {"inputs": {"image": {"shapes": [[64, 3, 16, 16]]}}}
    if is_noise:
        record = build.verify(source, **many).record
        assert record.noise_floor[0].ratio > 1 >= record.errors[0].ratio
        assert "elements are outside the tolerance" in build.said[-1]
        build.folder.rename(build.root / "first")
    with pytest.raises(VerificationError):
        build.verify(source, verify={"rtol": 1e-3} if is_noise else {}, **many)


def test_an_output_may_have_a_tolerance_of_its_own(build):
    source = two_outputs()
    candidate = changed(source, lambda graph: set_weight(graph.initializer[1], 0.001))
    loose = {"outputs": {"second": {"rtol": 10, "atol": 10}}}
    record = build.verify(source, candidate, verify=loose, **LEFT).record
    assert [error.output for error in record.errors] == ["first", "second"]
    assert record.errors[1].max_abs > 1e-3


def test_the_users_samples_are_used_and_missing_shapes_are_seeded(build):
    feeds = {name: np.full((3, 4), 0.5, np.float32) for name in ("left", "right")}
    write_tensors(build.root / "real.npz", feeds | {"label": np.array(1)})
    record = build.verify(models.two_inputs(), samples="*.npz", **LEFT).record
    assert (record.samples, record.inputs) == (2, "samples")
    assert read_tensors(build.folder / "samples" / "0.npz")["left"].shape == (2, 4)
    assert oct(build.folder.stat().st_mode & 0o777) == "0o700"


@pytest.mark.attack
def test_answers_to_other_samples_than_those_of_the_key_are_no_reference(build, monkeypatch):
    def replace_sample_and_make(spec, *rest):
        write_tensors(build.root / "new", {name: np.ones((3, 4), np.float32) for name in ("left", "right")})
        (build.root / "new").replace(build.root / "real.npz")
        return samples.make_samples(spec, *rest)

    write_tensors(build.root / "real.npz", {name: np.zeros((3, 4), np.float32) for name in ("left", "right")})
    monkeypatch.setattr(reference, "make_samples", replace_sample_and_make)
    with pytest.raises(SourceError, match=r"samples changed while they were read: \*\.npz"):
        build.verify(models.two_inputs(), samples="*.npz", **LEFT)


def test_a_real_input_is_never_the_golden_sample(build, monkeypatch):
    def refuse(*_arguments):
        raise StageError("it does not run")

    write_tensors(
        build.root / "real.npz", {name: np.full((3, 4), 0.5, np.float32) for name in ("left", "right")}
    )
    monkeypatch.setattr(golden_sample, "run_samples", refuse)
    with pytest.raises(SpecError, match="a bundle gets no real ones"):
        build.verify(models.two_inputs(), samples="*.npz", inputs={"left": {"shapes": [[3, 4]]}})
    assert not (build.folder / "golden.npz").exists()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (models.zero_inputs(), {}),
        (models.bfloat16_net(), {}),
        (models.half_net(), {"x": {"shapes": [[2, 8]]}}),
        (models.int8_net(), {"x": {"shapes": [[2, 8]]}}),
        (models.string_input(), {"words": {"shapes": [[4]], "values": ["low", "high", "é"]}}),
        (models.embedding(), {"ids": {"shapes": [[2, 7]]}}),
        (models.if_net(), {"x": {"shapes": [[2, 4], [0, 4]]}}),
    ],
    ids=["zero inputs", "bfloat16", "float16", "int8", "strings", "indices", "control flow, empty batch"],
)
def test_every_shape_of_model_can_be_verified(build, model, inputs):
    record = build.verify(model, inputs=inputs).record
    assert all(error.ratio <= 1 for error in record.errors)
    assert record.noise_floor


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=3), min_size=1, max_size=3),
    dtype=st.sampled_from([np.float32, np.int8, np.dtype("<U3")]),
)
def test_of_every_output_all_is_recorded_or_as_much_of_it_as_has_room(tmp_path_factory, shapes, dtype):
    folder = tmp_path_factory.mktemp("golden")
    arrays = {f"y{n}": np.arange(math.prod(s)).reshape(s).astype(dtype) for n, s in enumerate(shapes)}
    recorded = [Answer(name, str(folder / f"{name}.npy")) for name in arrays]
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    write_tensors(folder / "sample.npz", {"x": np.zeros(3)})
    with mock.patch.multiple(golden_sample, MAX_GOLDEN_BYTES=0, MIN_OUTPUT_BYTES=3000):
        for name in ("golden.npz", "again.npz"):
            golden_sample.write_golden(folder / name, sample=folder / "sample.npz", answers=recorded)
    assert (folder / "golden.npz").read_bytes() == (folder / "again.npz").read_bytes()
    entry = FileEntry("golden.npz", 0, "")
    inputs, outputs = read_golden(Golden(entry, Tolerance(0, 0)), folder)
    assert list(inputs) == ["x"]
    for name, array in arrays.items():
        assert outputs[name].shape == array.shape
        np.testing.assert_array_equal(
            outputs[name].values.reshape(-1), array.reshape(-1)[:: outputs[name].step]
        )
        assert outputs[name].values.nbytes <= 3000 // len(arrays)
        assert outputs[name].step == 1 or math.gcd(outputs[name].step, array.size) == 1, (
            "every axis, all of it"
        )


def two_outputs():
    """`first` = left · a, `second` = left · b."""
    rng = np.random.default_rng(0)
    return models.parse(
        """(float[batch, 4] left) => (float[batch, 3] first, float[batch, 3] second) {
            first = MatMul(left, a)
            second = MatMul(left, b)
        }""",
        **{name: rng.standard_normal((4, 3), np.float32) for name in ("a", "b")},
    )


def set_weight(tensor, value):
    values = onnx.numpy_helper.to_array(tensor).copy()
    values.flat[0] = value
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def set_weights(tensor, factor):
    tensor.CopyFrom(models.tensor(tensor.name, onnx.numpy_helper.to_array(tensor) * np.float32(factor)))


def normalized_conv():
    """Convolution and batch normalisation: optimisation folds them, so its sums are rounded otherwise."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((8, 3, 3, 3), np.float32)}
    weights |= {name: rng.uniform(0.5, 2, 8).astype(np.float32) for name in ("scale", "bias", "mean", "var")}
    return models.parse(
        """(float[batch, 3, 16, 16] image) => (float[batch, 8, 14, 14] y) {
            conv = Conv(image, w)
            y = BatchNormalization(conv, scale, bias, mean, var)
        }""",
        **weights,
    )


def optimise(source, destination):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(destination)
    destination.parent.mkdir()
    onnxruntime.InferenceSession(source, options, providers=[CPU])


def rename(graph, names):
    for node in graph.node:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]
    for value in graph.output:
        value.name = names.get(value.name, value.name)
