"""SIGKILL at every step: what is visible afterwards is whole, and going on finishes the work."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ortprep.bundle.verification import check_bundle
from ortprep.errors import NotPublishedError
from ortprep.registry.promotion import promote
from ortprep.registry.publish import publish
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef
from tests.registry.builders import BARE, HERE, Build, Made, read_tree, write_bundle

pytestmark = pytest.mark.slow

MEGABYTE = 2**20


@pytest.fixture(scope="module")
def dies():
    """A function that has `tests.registry.dying` do something, and says whether that was killed before."""
    command = [sys.executable, "-m", "tests.registry.dying"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(action, registry, path, name, step):
            process.stdin.write(json.dumps([action, registry, str(path), name, step]) + "\n")
            process.stdin.flush()
            code = int(process.stdout.readline())
            assert code in (0, -signal.SIGKILL)
            return code != 0

        yield run
        process.stdin.close()


def check_whole(catalogue, model, folder):
    for digest in catalogue.read_state(model).versions:
        out = folder / digest[-8:]
        pull(PullRequest(VersionRef(model, digest)), catalogue, out, hardware=BARE)
        check_bundle(out)


@pytest.mark.parametrize("kind", ["directory", "oci"])
def test_a_publisher_killed_at_any_step_leaves_nothing_half_visible(
    dies, registry, catalogue, model, tmp_path
):
    old = write_bundle(tmp_path / "old", name=model, spec=b"old")
    publish(old, catalogue, label="old")
    made = (Made("cpu", HERE, os.urandom(2 * MEGABYTE)), Made("portable", weights=os.urandom(2 * MEGABYTE)))
    bundle = write_bundle(tmp_path / "new", Build(made, name=model, created_at="2026-11-21T00:00:00+00:00"))
    killed = 0
    for step in [*range(60), 1000]:
        if not dies("publish", registry, bundle, model, step):
            break
        killed += 1
        check_whole(catalogue, model, tmp_path / f"out{step}")
    assert killed > (3 if "oci" in registry else 8)
    state = catalogue.read_state(model)
    assert len(state.versions) == 2
    pull(PullRequest(VersionRef(model, None)), catalogue, tmp_path / "out", hardware=BARE)
    assert read_tree(tmp_path / "out") == read_tree(bundle)
    again = publish(bundle, catalogue)
    assert (again.uploaded_bytes, again.is_new) == (0, False)


@pytest.mark.parametrize("kind", ["directory"])
def test_what_was_uploaded_before_a_kill_is_not_uploaded_again(dies, registry, catalogue, model, tmp_path):
    made = tuple(Made(f"v{i}", HERE, os.urandom(MEGABYTE)) for i in range(6))
    bundle = write_bundle(tmp_path / "new", Build(made, name=model))
    assert dies("publish", registry, bundle, model, 14)
    published = publish(bundle, catalogue)
    assert 0 < published.uploaded_bytes < published.total_bytes


@pytest.mark.parametrize("kind", ["directory"])
def test_a_puller_killed_at_any_step_leaves_the_old_bundle_or_the_new_one(
    dies, registry, catalogue, model, tmp_path
):
    publish(write_bundle(tmp_path / "old", name=model, spec=b"old"), catalogue, label="old")
    out = tmp_path / "out"
    pull(PullRequest(VersionRef(model, "old")), catalogue, out, hardware=BARE)
    before = read_tree(out)
    made = (Made("cpu", HERE, os.urandom(2 * MEGABYTE)), Made("portable", weights=os.urandom(2 * MEGABYTE)))
    bundle = write_bundle(tmp_path / "new", Build(made, name=model, created_at="2026-11-21T00:00:00+00:00"))
    publish(bundle, catalogue)
    killed = 0
    for step in [*range(0, 30, 2), 1000]:
        was_killed = dies("pull", registry, out, model, step)
        check_bundle(out)
        assert read_tree(out) == (before if was_killed else read_tree(bundle))
        killed += was_killed
        if not was_killed:
            break
    assert killed > 3
    assert not list(tmp_path.glob(".tmp-out*"))


@pytest.mark.parametrize("kind", ["directory"])
def test_a_collection_killed_at_any_step_leaves_every_version_whole(
    dies, registry, catalogue, model, tmp_path
):
    for i in range(4):
        build = Build((Made("portable", weights=bytes([i]) * 1000),), name=model, spec=bytes([i]))
        publish(write_bundle(tmp_path / str(i), build), catalogue, label=f"v{i}")
    promote(VersionRef(model, "v3"), "production", catalogue)
    for step in range(40):
        killed = dies("collect", registry, tmp_path / "x", model, step)
        check_whole(catalogue, model, tmp_path / f"out{step}")
        if not killed:
            break
    assert step > 5
    state = catalogue.read_state(model)
    (version,) = state.versions.values()
    assert version.label == "v3"
    part = catalogue.read_part(model, version.parts[0].digest)
    blobs = {path.name for path in Path(registry, model, "blobs").rglob("*") if path.is_file()}
    assert blobs == {entry.sha256.removeprefix("sha256:") for entry in part.files}
    with pytest.raises(NotPublishedError):
        pull(PullRequest(VersionRef(model, "v0")), catalogue, tmp_path / "gone", hardware=BARE)
