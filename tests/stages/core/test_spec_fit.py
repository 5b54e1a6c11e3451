"""A spec that does not fit its model is refused with every reason at once, and one that fits never is."""

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.model_facts import ModelInterface
from ortprep.errors import SourceError, SpecError, propose
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.spec.models import ModelSpec
from ortprep.spec.reading import read_spec
from ortprep.stages.core.results import plain_refusal
from ortprep.stages.core.sample_files import check_sample_files, find_sample_files, samples_key
from ortprep.stages.core.samples import write_samples
from ortprep.stages.core.spec_fit import find_misfits, require_fit, shape_sets
from tests.stages.fetch.test_inspection import peak_bytes

IMAGE = TensorSpec("image", "float32", ("batch", 3, 16, 16))
LEFT, RIGHT = (TensorSpec(name, "float32", ("batch", 4)) for name in ("left", "right"))
SCORES = TensorSpec("scores", "float32", ("batch", 10))


def spec_of(inputs=None, **fields):
    return ModelSpec.model_validate(
        {"name": "m", "source": {"path": "m.onnx"}, "inputs": inputs or {}, **fields}
    )


def interface_of(*inputs, **bounds):
    return ModelInterface(inputs, (SCORES,), bounds, external=False)


def problems(inputs, *items, **bounds):
    return "\n".join(find_misfits(spec_of(inputs), interface_of(*items, **bounds)))


def test_a_spec_that_fits_has_no_problem():
    spec = spec_of({"image": {"shapes": [[1, 3, 16, 16], [8, 3, 16, 16]], "range": [0, 1]}})
    assert find_misfits(spec, interface_of(IMAGE)) == ()
    assert shape_sets(spec, interface_of(IMAGE)) == ({"image": (1, 3, 16, 16)}, {"image": (8, 3, 16, 16)})


@pytest.mark.attack
def test_of_thousands_of_unknown_names_the_first_are_told():
    known = [TensorSpec(f"input{number}", "float32", (1,)) for number in range(1000)]
    found = find_misfits(spec_of({f"inputs{number}": {} for number in range(1000)}), interface_of(*known))
    assert len(found) == 21
    assert found[-1] == "inputs: 980 more names are not in the model"


@pytest.mark.attack
@pytest.mark.parametrize(
    "inputs",
    [{"a": {"values": ["word"] * 100_000}}, {"a": {"shapes": [[1]] * 1000}, "b": {"shapes": [[2]] * 1000}}],
)
def test_a_spec_and_a_model_of_a_megabyte_make_no_message_of_gigabytes(inputs):
    """A name of 300 KB was repeated for each of 200,000 values, a symbol of 1 MB for each of 1,000 shapes."""
    long = {key: key * 300_000 for key in "abN"}
    items = [TensorSpec(long[key], "float32", (long["N"],)) for key in "ab"]
    spec = spec_of({long[key]: declared for key, declared in inputs.items()})
    errors = []

    def refuse():
        with pytest.raises(SpecError) as caught:
            require_fit(spec, interface_of(*items))
        errors.append(caught.value)

    assert peak_bytes(refuse) < 20 * 2**20
    lines = errors[0].message.splitlines()
    assert max(map(len, lines)) < 1100
    assert len(lines) == 202
    assert lines[-1] == "  more problems, which are not listed"


@pytest.mark.attack
def test_the_nearest_of_long_names_is_found_in_time():
    """Two names of 20,000 letters took 14 s."""
    letters = [chr(0x4E00 + number % 150) for number in range(20_000)]
    names = ["".join(random.Random(seed).sample(letters, len(letters))) for seed in (0, 1)]
    began = time.process_time()
    propose(names[0], [names[1]])
    assert time.process_time() - began < 1.0


def test_every_problem_is_told_at_once():
    spec = spec_of(
        {"imag": {}, "left": {"shapes": [[2, 5]]}, "words": {}},
        verify={"outputs": {"score": {"rtol": 0, "atol": 0}}},
    )
    words = TensorSpec("words", "string", (3,))
    image = TensorSpec("image", "float32", ("images", 3, 16, 16))
    found = find_misfits(spec, interface_of(image, LEFT, words))
    assert [problem.partition(":")[0] for problem in found] == [
        "inputs.imag",
        "verify.outputs.score",
        "inputs.left.shapes[0]",
        "inputs.words.values",
        "inputs.image.shapes",
    ]
    assert "did you mean 'image'?" in found[0]
    assert "did you mean 'scores'?" in found[1]


def test_dynamic_axes_need_shapes():
    assert "inputs.image.shapes: missing" in problems({}, IMAGE)
    assert "inputs.x.shapes: missing" in problems({}, TensorSpec("x", "float32", None))
    assert problems({"x": {"shapes": [[1, 2, 3]]}}, TensorSpec("x", "float32", None)) == ""


def test_a_symbol_has_one_size_in_a_set():
    clash = problems({"left": {"shapes": [[2, 4]]}, "right": {"shapes": [[3, 4]]}}, LEFT, RIGHT)
    assert clash == "inputs: expected one size of 'batch' in shapes[0], got 2 in left, 3 in right"
    square = TensorSpec("square", "float32", ("n", "n"))
    assert "2 in square, 3 in square" in problems({"square": {"shapes": [[2, 3]]}}, square)


def test_a_symbol_that_one_input_settles_fills_the_others():
    spec = spec_of({"left": {"shapes": [[2, 4], [5, 4]]}})
    assert find_misfits(spec, interface_of(LEFT, RIGHT)) == ()
    assert shape_sets(spec, interface_of(LEFT, RIGHT)) == (
        {"left": (2, 4), "right": (2, 4)},
        {"left": (5, 4), "right": (5, 4)},
    )


def test_one_shape_goes_with_all_of_the_others():
    table = TensorSpec("table", "float32", (None, 4))
    spec = spec_of({"left": {"shapes": [[2, 4], [5, 4]]}, "table": {"shapes": [[7, 4]]}})
    assert find_misfits(spec, interface_of(LEFT, table)) == ()
    assert [shapes["table"] for shapes in shape_sets(spec, interface_of(LEFT, table))] == [(7, 4), (7, 4)]


def test_unequal_numbers_of_shapes_are_told():
    inputs = {"left": {"shapes": [[1, 4], [2, 4]]}, "right": {"shapes": [[1, 4], [2, 4], [3, 4]]}}
    assert "got left 2, right 3" in problems(inputs, LEFT, RIGHT)


@pytest.mark.parametrize("dtype", ["sequence(float32)", "optional(float32)", "map(int64, float32)"])
def test_inputs_and_outputs_that_are_no_tensors_are_refused_by_name(dtype):
    strange = TensorSpec("strange", dtype, None)
    assert problems({}, strange) == (
        f"input 'strange' of the model: not supported, expected a tensor, got {dtype}"
    )
    (found,) = find_misfits(spec_of(), ModelInterface((), (strange,), {}, external=False))
    assert f"output 'strange' of the model: not supported, expected a tensor, got {dtype}" in found
    assert ("drop_zip_map" in found) == ("map(" in dtype)


@pytest.mark.parametrize(
    ("dtype", "wanted", "fits"),
    [
        ("float32", {"range": [-1, 1]}, True),
        ("float16", {"range": [0, 70_000]}, False),
        ("float64", {"range": [0, 1e300]}, True),
        ("float32", {"range": [0, 1e300]}, False),
        ("uint8", {"range": [0, 255]}, True),
        ("uint8", {"range": [0, 256]}, False),
        ("uint8", {"range": [-1, 1]}, False),
        ("int64", {"range": [0.2, 0.8]}, False),
        ("int64", {"range": [0, 1e300]}, False),
        ("bool", {"range": [0, 1]}, True),
        ("bool", {"range": [0, 2]}, False),
        ("string", {"range": [0, 1]}, False),
        ("string", {"values": ["a", "b"]}, True),
        ("string", {"values": ["a", 1]}, False),
        ("string", {}, False),
        ("float32", {"values": [1, 2.5]}, True),
        ("float32", {"values": ["a"]}, False),
        ("float16", {"values": [1e6]}, False),
        ("int64", {"values": [1, 2]}, True),
        ("int64", {"values": [1.5]}, False),
        ("int8", {"values": [300]}, False),
        ("int8", {"values": [True]}, False),
        ("bool", {"values": [True, False]}, True),
        ("bool", {"values": [2]}, False),
    ],
)
def test_range_and_values_fit_the_element_type(dtype, wanted, fits):
    assert (problems({"x": wanted}, TensorSpec("x", dtype, (2,))) == "") is fits


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"values": [6]}, True),
        ({"values": [7]}, False),
        ({"range": [7, 9]}, False),
        ({"range": [0, 9]}, True),
    ],
)
def test_indices_fit_what_they_index(wanted, fits):
    ids = TensorSpec("ids", "int64", (2,))
    assert ("expected indices below 7" not in problems({"ids": wanted}, ids, ids=7)) is fits


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
axes = st.one_of(st.integers(0, 3), st.sampled_from(["a", "b"]), st.none())
items = st.lists(st.one_of(st.none(), st.lists(axes, max_size=3).map(tuple)), max_size=3)


@given(model=items, given_shapes=st.lists(st.lists(shapes, max_size=3), max_size=3))
def test_shapes_of_a_spec_that_fits_are_complete_and_fit_the_model(model, given_shapes):
    interface = interface_of(*(TensorSpec(f"x{i}", "float32", shape) for i, shape in enumerate(model)))
    spec = spec_of({f"x{i}": {"shapes": item} for i, item in enumerate(given_shapes[: len(model)])})
    if find_misfits(spec, interface):
        return
    for chosen in shape_sets(spec, interface):
        symbols = {}
        for item in interface.inputs:
            size = chosen[item.name]
            if item.shape is None:
                continue
            assert len(size) == len(item.shape)
            for axis, got in zip(item.shape, size, strict=True):
                assert axis is None or got == (
                    symbols.setdefault(axis, got) if isinstance(axis, str) else axis
                )


def sample_problems(folder, *items):
    spec = spec_of({}, samples="samples/*.npz").located_in(folder)
    return "\n".join(check_sample_files(spec, interface_of(*items)))


def test_samples_that_fit_have_no_problem(tmp_path):
    (tmp_path / "samples").mkdir()
    words = TensorSpec("a/words", "string", ("n",))
    arrays = {"left": np.zeros((2, 4), np.float32), "a/words": np.array(["x", "yy"]), "more": np.zeros(3)}
    write_tensors(tmp_path / "samples" / "0.npz", arrays)
    np.savez_compressed(tmp_path / "samples" / "1.npz", allow_pickle=False, **arrays)
    assert sample_problems(tmp_path, LEFT, words) == ""


@pytest.mark.attack
def test_links_to_a_sample_are_one_sample(tmp_path):
    (tmp_path / "samples").mkdir()
    np.savez(tmp_path / "samples" / "0.npz", left=np.zeros((2, 4), np.float32))
    for index in range(1, 10):
        (tmp_path / "samples" / f"{index}.npz").symlink_to("0.npz")
    spec = spec_of({}, samples="samples/*.npz").located_in(tmp_path)
    assert [file.name for file in find_sample_files(spec)] == ["0.npz"]


@pytest.mark.attack
def test_samples_of_terabytes_of_holes_are_not_hashed(tmp_path):
    (tmp_path / "samples").mkdir()
    with (tmp_path / "samples" / "0.npz").open("wb") as file:
        file.truncate(4 * 2**40)
    spec = spec_of({}, samples="samples/*.npz").located_in(tmp_path)
    with pytest.raises(SourceError, match="too large: the samples"):
        samples_key(spec)


@pytest.mark.attack
def test_samples_that_unfold_to_more_than_a_disk_holds_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("ortprep.stages.core.samples.MAX_SAMPLE_BYTES", 100)
    (tmp_path / "samples").mkdir()
    for index in range(4):
        array = np.full((2, 4), index, np.float32)
        np.savez_compressed(tmp_path / "samples" / f"{index}.npz", left=array)
    spec = spec_of({"left": {"shapes": [[2, 4]]}}, samples="samples/*.npz")
    with pytest.raises(SourceError, match=r"at most 100 bytes as arrays, got more with 3\.npz"):
        write_samples((spec, tmp_path, interface_of(LEFT), tmp_path / "made"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 4)), "expected float32 ['batch', 4], got float64 [2, 4]"),
        (np.zeros((2, 5), np.float32), "got float32 [2, 5]"),
        (np.zeros(4, np.float32), "got float32 [4]"),
        (np.array([[None]]), "holds pickled objects"),
    ],
)
def test_samples_that_contradict_the_model_are_told(tmp_path, array, message):
    (tmp_path / "samples").mkdir()
    np.savez(tmp_path / "samples" / "0.npz", left=array)
    assert message in sample_problems(tmp_path, LEFT)


def test_samples_that_are_absent_or_unreadable_are_told(tmp_path):
    assert "expected .npz files, got none" in sample_problems(tmp_path, LEFT)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "0.npz").write_bytes(b"PK but no zip")
    assert "samples/0.npz File is not a zip file" in sample_problems(tmp_path, LEFT)
    np.savez(tmp_path / "samples" / "0.npz", right=np.zeros(1))
    assert "expected an array 'left', got right" in sample_problems(tmp_path, LEFT)


def test_automatic_precision_needs_samples_to_calibrate_and_to_judge(tmp_path):
    left = {"left": {"shapes": [[2, 4]]}}
    spec = spec_of(left, convert={"precision": "auto"}, samples="*.npz").located_in(tmp_path)
    np.savez(tmp_path / "1.npz", left=np.zeros((2, 4), np.float32))
    with pytest.raises(SpecError, match="at least 2 real inputs for convert"):
        require_fit(spec, interface_of(LEFT))
    np.savez(tmp_path / "2.npz", left=np.zeros((2, 4), np.float32))
    require_fit(spec, interface_of(LEFT))


# -- which files a spec's globs find


def spec_with(folder, glob):
    path = folder / "net.yaml"
    path.write_text(f"name: net\nsource: {{path: resnet50.onnx}}\nsamples: '{glob}'\n")
    return read_spec(path)


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("*.npz", ["a.npz"]),
        ("./in//*.npz", ["in/b.npz"]),
        ("link/?.npz", ["link/b.npz"]),
        ("in/deep/../b.npz", ["in/deep/../b.npz"]),
        ("missing/x.npz", []),
        ("a.npz/*.npz", []),
    ],
)
def test_a_glob_finds_what_pathlib_finds(tmp_path, glob, names):
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("in")
    for name in ("a.npz", "in/b.npz", "in/deep/c.npz", "in/deep/c.txt"):
        (tmp_path / name).touch()
    assert find_sample_files(spec_with(tmp_path, glob)) == tuple(tmp_path / name for name in names)
    assert set(tmp_path.glob(glob)) == {tmp_path / name for name in names}


@pytest.mark.attack
def test_inputs_of_more_elements_than_can_be_drawn_are_refused():
    any_size = TensorSpec("x", "float32", ("n", "m"))
    assert "elements of all inputs in shapes[1]" in problems(
        {"x": {"shapes": [[1, 2], [2**16, 2**16]]}}, any_size
    )
    assert problems({"x": {"shapes": [[2**15, 2**15]]}}, any_size) == ""


@pytest.mark.attack
@pytest.mark.parametrize("name", ["x" * 10**5, "onnxruntime" * 10**4, " " * 10**5])
def test_a_message_with_long_names_is_made_plain_at_once(name):
    begun = time.process_time()
    plain_refusal(f"Fatal error: {name} is not a registered function/op")
    assert time.process_time() - begun < 5
