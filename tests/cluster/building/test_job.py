"""A spec travels with all that it names; what a node does beside its job: its niceness and its folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ortprep.build.receipts import RECEIPT_VERSION, TaskReceipt
from ortprep.cluster.building.job import BuildJob, ShippedSpec, describe_spec, place_spec, working_folder
from ortprep.errors import CacheError
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.accuracy import gate_key
from ortprep.stages.core.sample_files import samples_key


def build(root: Path) -> ModelSpec:
    for folder in ("samples/deep", "team/configs"):
        (root / folder).mkdir(parents=True)
    np.savez(root / "samples" / "deep" / "a.npz", x=np.zeros(1))
    (root / "team" / "configs" / "metrics.py").write_text("def f(inputs, expected, got): return 1.0\n")
    data = {
        "name": "net",
        "source": {"demo": "squeezenet"},
        "samples": "../../samples/**/*.npz",
        "convert": {
            "precision": ["int8"],
            "quantize": {"mode": "static"},
            "gate": {"metric": "metrics:f", "metric_at_least": 0.5},
        },
    }
    return ModelSpec.model_validate(data).located_in(root / "team" / "configs", file="net.yaml")


def test_every_key_is_the_same_where_it_comes_to_lie(tmp_path):
    spec = build(tmp_path / "home")
    shipped, root = describe_spec(spec)
    assert {entry.path for entry in shipped.files} == {
        "samples/deep/a.npz",
        "team/configs/metrics.py",
    }
    away = tmp_path / "away"
    for entry in shipped.files:
        (away / entry.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / entry.path, away / entry.path)
    placed = place_spec(shipped, away)
    assert placed.folder == away / "team" / "configs"
    assert placed.model_dump() == spec.model_dump()
    for key in (samples_key, gate_key):
        assert key(placed) == key(spec)


def test_links_are_followed_as_the_local_build_follows_them(tmp_path):
    spec = build(tmp_path / "home")
    real = tmp_path / "home" / "samples" / "deep" / "a.npz"
    (tmp_path / "elsewhere.npz").write_bytes(real.read_bytes())
    real.unlink()
    real.symlink_to(tmp_path / "elsewhere.npz")
    (tmp_path / "link").symlink_to(tmp_path / "home" / "team" / "configs")
    linked = spec.located_in(tmp_path / "link", file="net.yaml")
    shipped, root = describe_spec(linked)
    assert (shipped, root) == describe_spec(spec)
    assert real in [root / entry.path for entry in shipped.files]


def test_a_spec_that_names_nothing_travels_alone(tmp_path):
    spec = ModelSpec.model_validate({"name": "net", "source": {"demo": "squeezenet"}})
    shipped, _ = describe_spec(spec.located_in(tmp_path, file="net.yaml"))
    assert (shipped.place, shipped.files) == (".", ())
    assert place_spec(shipped, tmp_path / "away").folder == tmp_path / "away"


SPEC = ShippedSpec({"name": "net"}, "net.yaml", ".", ())
SOURCE = TaskReceipt(RECEIPT_VERSION, "fetch", {}, (), {}, "2026-01-01T00:00:00+00:00", 1.0)
JOB = BuildJob(SPEC, SOURCE, "farm", "cpu", "file:///store", "file:///registry")

CHILD = """
import logging, os
logging.basicConfig(format="%(message)s")
from ortprep.cluster.building.job import reset_niceness
os.nice(5)
if {drop}:
    os.setuid(65534)
reset_niceness()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def run(*, drop: bool) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", CHILD.format(drop=drop)]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=600)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may take niceness back")
def test_what_is_measured_runs_as_jobs_do_not_as_ray_s_workers():
    assert run(drop=False).stdout == "0\n"


def test_who_may_not_take_the_niceness_back_is_warned():
    ended = run(drop=os.getuid() == 0)
    assert int(ended.stdout) >= 5
    assert "start Ray with RAY_worker_niceness=0" in ended.stderr


@pytest.mark.attack
def test_nothing_is_removed_behind_a_link_in_the_place_of_the_folder(tmp_path, monkeypatch):
    cache, precious = tmp_path / "cache", tmp_path / "mine" / "precious"
    precious.mkdir(parents=True)
    os.utime(precious, (0, 0))
    cache.mkdir()
    (cache / "cluster").symlink_to(precious.parent)
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(cache))
    with pytest.raises(CacheError, match="not safe to use"), working_folder(JOB):
        pass
    assert precious.exists()
