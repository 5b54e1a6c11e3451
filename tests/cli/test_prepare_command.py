"""What `prepare` says of its engines before anything is begun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.prepare.builders import Project


def test_options_of_one_engine_are_refused_by_the_other(tmp_path: Path) -> None:
    project = Project(tmp_path)
    ended = project.run("prepare", "--store", "store", "--no-collect", "--node-timeout", "1")
    assert ended.code == 2
    assert "option of another engine: --store, --collect, --node-timeout" in ended.err
    ended = project.run("prepare", "--engine", "ray", "--store", "store", "-n", "4")
    assert ended.code == 2
    assert "option of another engine: --jobs\n  expected it only with --engine local" in ended.err


def test_a_cluster_needs_a_store(tmp_path: Path) -> None:
    ended = Project(tmp_path).run("prepare", "--engine", "ray")
    assert ended.code == 2
    assert "expected --store or $ORTPREP_STORE, got neither" in ended.err


@pytest.mark.slow
def test_an_address_where_nobody_listens_is_told_at_once(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write_spec()
    ended = project.run("prepare", "--engine", "ray", "--store", "store", "--address", "127.0.0.1:1")
    assert ended.code == 1
    assert "cannot reach a Ray cluster: 127.0.0.1:1" in ended.err


def test_labels_of_this_machine_fit_ray_s_command_line(tmp_path: Path) -> None:
    project = Project(tmp_path)
    line = project.run("node-labels").out.strip()
    told = json.loads(project.run("node-labels", "--json").out)
    assert line == ",".join(f"{key}={value}" for key, value in told.items())
    assert "ortprep.io/machine" in told
