"""Which files a spec's `samples` glob finds."""

from pathlib import Path

import pytest

from ortprep.spec.models import ModelSpec
from ortprep.spec.reading import read_spec
from ortprep.stages.core.inputs.sample_files import find_sample_files


def spec_with(folder: Path, glob: str) -> ModelSpec:
    path = folder / "net.yaml"
    path.write_text(f"name: net\nsource: {{demo: resnet50}}\nsamples: '{glob}'\n")
    return read_spec(path)


@pytest.mark.attack
@pytest.mark.parametrize("glob", ["*/*/*/*/x.npz", "d*/../d*/../d*/../d*/../x.npz", "**/*/*/*/x.npz"])
def test_no_glob_leads_into_a_folder_again_and_again(tmp_path: Path, glob: str) -> None:
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
def test_a_glob_finds_what_pathlib_finds(tmp_path: Path, glob: str, names: list[str]) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("in")
    for name in ("a.npz", "in/b.npz", "in/deep/c.npz", "in/deep/c.txt"):
        (tmp_path / name).touch()
    assert find_sample_files(spec_with(tmp_path, glob)) == tuple(tmp_path / name for name in names)
    assert set(tmp_path.glob(glob)) == {tmp_path / name for name in names}
