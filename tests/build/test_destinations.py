"""A bundle replaces an older bundle and nothing else; what a user put in its place stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ortprep.build.build_plan import check_buildable, check_destinations
from ortprep.errors import SpecError
from ortprep.spec.models import ModelSpec, SourceSpec
from tests.registry.builders import read_tree
from tests.runtime.builders import write_bundle


def spec(folder: Path, *, path: str = "net.onnx", name: str = "net") -> ModelSpec:
    return ModelSpec(name=name, source=SourceSpec(path=path)).located_in(folder)


def _cleared(folder: Path) -> Path:
    folder.rmdir()
    return folder


def _newer(folder: Path) -> None:
    (folder / "loader.json").unlink()
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": "1.', '"schema_version": "9.', 1))


REPLACEABLE: dict[str, Callable[[Path], object]] = {
    "nothing": Path.rmdir,
    "an empty folder": lambda folder: None,
    "a bundle": write_bundle,
    "a bundle without manifest": lambda folder: (write_bundle(folder) / "manifest.json").unlink(),
    "a bundle without loader config": lambda folder: (write_bundle(folder) / "loader.json").unlink(),
    "a damaged bundle": lambda folder: (write_bundle(folder) / "loader.json").write_text("?"),
    "a newer version's": lambda folder: _newer(write_bundle(folder)),
}

PRECIOUS: dict[str, Callable[[Path], object]] = {
    "a model": lambda folder: (folder / "model.onnx").write_text("precious"),
    "another program's manifest": lambda folder: (folder / "manifest.json").write_text('{"name": "app"}'),
    "a folder in the place of a record": lambda folder: (folder / "loader.json").mkdir(),
    "a file": lambda folder: _cleared(folder).write_text("precious"),
    "a link that leads nowhere": lambda folder: _cleared(folder).symlink_to("nowhere"),
}


@pytest.mark.parametrize("put", REPLACEABLE.values(), ids=REPLACEABLE)
def test_what_a_build_left_or_nothing_may_be_replaced(tmp_path, put):
    (tmp_path / "net").mkdir()
    put(tmp_path / "net")
    before = read_tree(tmp_path)
    check_destinations([spec(tmp_path)], tmp_path)
    assert read_tree(tmp_path) == before, "checking replaces nothing yet"


@pytest.mark.parametrize("put", PRECIOUS.values(), ids=PRECIOUS)
def test_what_is_no_bundle_may_not(tmp_path, put):
    (tmp_path / "net").mkdir()
    put(tmp_path / "net")
    with pytest.raises(SpecError, match=f"expected nothing, .* at {tmp_path / 'net'}, got ") as caught:
        check_destinations([spec(tmp_path, name="other"), spec(tmp_path)], tmp_path)
    assert f"mv {tmp_path / 'net'} {tmp_path / 'net'}.mine" in (caught.value.hint or "")


@pytest.mark.parametrize("inside", ["net/cpu", ".work/net/fetch"])
def test_a_source_is_never_in_what_its_own_build_replaces(tmp_path, inside):
    write_bundle(tmp_path / "net")
    with pytest.raises(SpecError, match="expected its source outside"):
        check_destinations([spec(tmp_path, path=f"{inside}/net.onnx")], tmp_path)
    (tmp_path / inside).mkdir(parents=True, exist_ok=True)
    (tmp_path / "link").symlink_to(inside)
    with pytest.raises(SpecError, match="expected its source outside"):
        check_destinations([spec(tmp_path, path="link/net.onnx")], tmp_path)


def test_a_source_may_be_in_the_bundle_of_a_model_that_is_not_built(tmp_path):
    write_bundle(tmp_path / "other")
    source = "other/cpu/linear_optimized.onnx"
    check_destinations([spec(tmp_path, path=source)], tmp_path)
    with pytest.raises(SpecError, match="expected its source outside"):
        check_destinations([spec(tmp_path, path=source, name="other")], tmp_path)


@pytest.mark.attack
@pytest.mark.parametrize(
    "place", ["", ".work", ".work/net", ".work/net/locks", ".work/net/fetch", ".work/net/receipts/a", "net"]
)
def test_links_in_an_artifacts_folder_that_a_clone_brings_are_refused(tmp_path, place):
    """Through them a build would write, overwrite and delete in the user's home."""
    home = tmp_path / "home"
    write_bundle(home)
    link = tmp_path / "artifacts" / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home)
    with pytest.raises(SpecError, match=f"link where files are written: {link}\n") as caught:
        check_buildable([spec(tmp_path)], tmp_path / "artifacts")
    assert caught.value.hint == f"rm {link}"
