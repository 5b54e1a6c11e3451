"""Which files a spec's globs find, and the check that a calibration set has to pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.model_facts import ModelInterface
from ortprep.errors import StageError
from ortprep.runtime.tensors.element_types import Array
from ortprep.spec.models import ModelSpec
from ortprep.spec.reading import read_spec
from ortprep.stages.core.inputs.sample_files import check_calibration, find_sample_files


def spec_with(folder: Path, glob: str) -> ModelSpec:
    path = folder / "net.yaml"
    path.write_text(f"name: net\nsource: {{demo: resnet50}}\nsamples: '{glob}'\n")
    return read_spec(path)


@pytest.mark.attack
@pytest.mark.parametrize("glob", ["*/*/*/*/x.npz", "d*/../d*/../d*/../d*/../x.npz", "**/*/*/*/x.npz"])
def test_no_glob_leads_into_a_folder_again_and_again(tmp_path, glob):
    """Five links found one file 625 times in four steps, and each further step took 5 times more."""
    for number in range(5):
        (tmp_path / f"link{number}").symlink_to(".")
        (tmp_path / f"d{number}").mkdir()
    (tmp_path / "x.npz").touch()
    assert len(find_sample_files(spec_with(tmp_path, glob))) == 1


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("*.npz", ["a.npz"]),
        ("./in//*.npz", ["in/b.npz"]),
        ("**/*.npz", ["a.npz", "in/b.npz", "in/deep/c.npz"]),
        ("in/**/?.npz", ["in/b.npz", "in/deep/c.npz"]),
        ("in/[cd]*/c.npz", ["in/deep/c.npz"]),
        ("lin*/*.npz", ["link/b.npz"]),
        ("in/deep/../b.npz", ["in/deep/../b.npz"]),
        ("missing/*/x.npz", []),
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


GOOD: dict[str, Array] = {"image": np.ones((2, 3), np.float32), "count": np.array([4, 5], np.int64)}


def _interface(*inputs: TensorSpec) -> ModelInterface:
    specs = inputs or (TensorSpec("image", "float32", ("batch", 3)), TensorSpec("count", "int64", (None,)))
    return ModelInterface(inputs=specs, outputs=(), index_bounds={}, external=False)


def _write(folder: Path, **arrays: Array) -> Path:
    path = folder / "sample.npz"
    np.savez(path, allow_pickle=False, **arrays)
    return path


def test_an_empty_set_is_refused():
    with pytest.raises(StageError, match="calibration set is empty"):
        check_calibration([], _interface())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"image": np.ones((2, 3), np.float64)}, r"expected float32 .*, got float64"),
        ({"image": np.ones((2, 4), np.float32)}, r"expected float32 \['batch', 3\], got float32 \[2, 4\]"),
        ({"image": np.ones(3, np.float32)}, r"expected float32 \['batch', 3\], got float32 \[3\]"),
        ({"image": np.ones((0, 3), np.float32)}, "expected at least one"),
        ({"image": np.array([[0, 1, 2], [3, np.nan, 5]], np.float32)}, r"got nan at index \[1, 1\]"),
        ({"image": np.array([[0, 1, -np.inf]], np.float32)}, r"got -inf at index \[0, 2\]"),
    ],
)
def test_an_array_that_does_not_fit_is_named_with_its_file(tmp_path, changed, says):
    check_calibration([_write(tmp_path, **GOOD)], _interface())
    path = _write(tmp_path, **{**GOOD, **changed})
    with pytest.raises(StageError, match=says) as caught:
        check_calibration([path], _interface())
    assert "'image'" in caught.value.message
    assert str(path) in caught.value.message


def test_a_file_that_is_no_sample_is_named(tmp_path):
    (tmp_path / "text.npz").write_text("nothing")
    for name in ("text.npz", "absent.npz"):
        with pytest.raises(StageError, match=name):
            check_calibration([tmp_path / name], _interface())


@pytest.mark.parametrize("dtype", ["bfloat16", "sequence(float32)"])
def test_a_model_that_calibration_cannot_feed_is_refused(tmp_path, dtype):
    with pytest.raises(StageError, match="cannot calibrate a model with input 'x'"):
        check_calibration([_write(tmp_path, **GOOD)], _interface(TensorSpec("x", dtype, (2,))))
