"""What a node works in is its own, and nothing else is removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortprep.cluster.building.job import BuildJob
from ortprep.cluster.building.node_folder import working_folder
from ortprep.cluster.building.spec_files import ShippedSpec
from ortprep.errors import CacheError

SPEC = ShippedSpec({"name": "net"}, "net.yaml", ".", ())
JOB = BuildJob(SPEC, "sha256:0", "farm", "cpu", "file:///store", "file:///registry")


@pytest.mark.attack
def test_nothing_is_removed_behind_a_link_in_the_place_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, precious = tmp_path / "cache", tmp_path / "mine" / "precious"
    precious.mkdir(parents=True)
    os.utime(precious, (0, 0))
    cache.mkdir()
    (cache / "cluster").symlink_to(precious.parent)
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(cache))
    with pytest.raises(CacheError, match="not safe to use"), working_folder(JOB):
        pass
    assert precious.exists()
