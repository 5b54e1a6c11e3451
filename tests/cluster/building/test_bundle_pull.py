"""What a driver fetches of what its nodes published; without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortprep.cluster.building.bundle_pull import pull_merged_bundle
from ortprep.errors import ClusterError
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.publish import publish
from tests.registry.builders import ELSEWHERE, HERE, Made, read_tree, write_bundle


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of what two kinds of nodes published: one like this machine, one of another architecture."""
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    here = write_bundle(tmp_path / "here", made=(Made("cpu", HERE, b"here"),))
    other = write_bundle(tmp_path / "other", made=(Made("cpu", ELSEWHERE),), created_at="2026-11-21")
    with open_catalogue(str(tmp_path / "registry")) as catalogue:
        return [publish(bundle, catalogue).part for bundle in (here, other)]


def test_the_driver_gets_the_part_that_fits_it_best_and_only_once(parts: list[str], tmp_path: Path) -> None:
    registry, out = str(tmp_path / "registry"), tmp_path / "out"
    assert pull_merged_bundle("net", parts, registry, out)
    assert read_tree(out) == read_tree(tmp_path / "here")
    assert not pull_merged_bundle("net", parts, registry, out)
    (out / "golden.npz").unlink()
    assert pull_merged_bundle("net", parts, registry, out)


def test_parts_that_are_not_there_are_an_error(parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no version of net has the parts that its nodes published"):
        pull_merged_bundle(
            "net", [*parts, "sha256:" + "0" * 64], str(tmp_path / "registry"), tmp_path / "out"
        )
