"""Disks that are full or read-only: an error that says so, the old bundle whole, the next run complete."""

import ctypes
import os
import re
import shutil
from contextlib import contextmanager

import pytest

from tests.builders import matmul_net, write_model
from tests.prepare.builders import SHAPES, done, folding_net, is_intact, stamps, untouched

MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096
MNT_DETACH = 2

libc = ctypes.CDLL(None, use_errno=True)


def mount(source, target, *, kind, flags=0, data=""):
    encoded = None if kind is None else kind.encode()
    if libc.mount(source.encode(), os.fsencode(target), encoded, flags, data.encode()) != 0:
        pytest.skip(f"mounting is not allowed here: {os.strerror(ctypes.get_errno())}")


@contextmanager
def mounted(source, target, *, kind, flags=0, data=""):
    mount(source, target, kind=kind, flags=flags, data=data)
    try:
        yield
    finally:
        libc.umount2(os.fsencode(target), MNT_DETACH)


@contextmanager
def small_disk(folder, *, size_kb):
    """Moves a folder's content to a disk of its own, and back when the block ends."""
    aside = folder.with_name("aside")
    folder.mkdir(exist_ok=True)
    shutil.copytree(folder, aside)
    with mounted("none", folder, kind="tmpfs", data=f"size={size_kb}k"):
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        yield
    shutil.rmtree(aside)


@contextmanager
def read_only(folder):
    """Makes a folder read-only for everyone, root included."""
    folder.mkdir(exist_ok=True)
    with mounted(str(folder), folder, kind=None, flags=MS_BIND):
        mount("none", folder, kind=None, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)
        yield


@pytest.mark.slow
def test_a_read_only_artifacts_folder_is_told_and_its_bundle_stays(built):
    write_model(folding_net(seed=1), built.models / "net.onnx")
    with read_only(built.artifacts), untouched(built):
        outcome = built.run("prepare")
        assert (outcome.code, outcome.out) == (1, "")
        assert re.search(r"error: fetch of net: Read-only file system: .*artifacts", outcome.err), outcome.err
        assert "Traceback" not in outcome.err
    assert done(built.doit("fetch")) == {"fetch:net"}


@pytest.mark.slow
def test_a_bundle_on_a_read_only_disk_loads_is_checked_and_is_up_to_date(built):
    with read_only(built.root):
        outcome = built.python(
            "-c", "from ortprep.runtime import load; load('artifacts/net', check='golden')"
        )
        assert (outcome.code, outcome.err) == (0, "")
        assert built.run("check", "artifacts/net").code == 0
        assert built.run("prepare").err.endswith("0 done, 7 up to date\n")


def free_kb(folder):
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize // 1024


@pytest.mark.slow
@pytest.mark.parametrize("spare_kb", [0, 400], ids="{} kB left".format)
def test_a_full_disk_is_told_and_the_old_bundle_stays(built, spare_kb):
    with small_disk(built.artifacts, size_kb=4096):
        fill(built.artifacts, spare_kb=spare_kb)
        write_model(matmul_net(size=128, layers=4), built.models / "net.onnx")
        built.write_spec(inputs={"x": {"shapes": [[1, 128]]}})
        with untouched(built):
            outcome = built.run("prepare")
        assert (outcome.code, outcome.out) == (1, "")
        assert re.search(r"error: \w+(/\w+)? of net: ", outcome.err)
        assert "No space left on device" in outcome.err, outcome.err
        assert "Traceback" not in outcome.err
        assert is_intact(built.bundle())

        (built.artifacts / "ballast").unlink()
        write_model(folding_net(), built.models / "net.onnx")
        built.write_spec(inputs=SHAPES)
        assert built.doit("verify").code == 0


def fill(folder, *, spare_kb):
    (folder / "ballast").write_bytes(bytes(1024 * max(0, free_kb(folder) - spare_kb)))


@pytest.mark.slow
def test_temporary_files_without_room_are_never_the_models_fault(project):
    """With a page for a request and none for its answer, all that a child has left is its exit code."""
    with small_disk(project.root / "tmp", size_kb=64):
        # Less, and Python takes another folder for them; more, and how far a build comes is chance.
        fill(project.root / "tmp", spare_kb=4)
        outcome = project.run("prepare")
    assert (outcome.code, outcome.out) == (1, "")
    assert "error: fetch of net: No space left on device" in outcome.err, outcome.err
    assert f"hint: df -h {project.artifacts} {project.root / 'tmp'}" in outcome.err


@pytest.mark.manual
def test_a_disk_that_fills_up_at_any_point_of_a_build_leaves_the_old_bundle(built):
    """Leaves a little more room each time, so that stage after stage cannot write, until a build ends."""
    failed = set()
    with small_disk(built.artifacts, size_kb=8192):
        write_model(matmul_net(size=128, layers=4), built.models / "net.onnx")
        built.write_spec(inputs={"x": {"shapes": [[1, 128]]}})
        old = stamps(built.bundle())
        for room_kb in range(0, 4000, 64):
            ballast = built.artifacts / "ballast"
            ballast.unlink(missing_ok=True)
            ballast.write_bytes(bytes(1024 * max(0, free_kb(built.artifacts) - room_kb)))
            outcome = built.run("prepare")
            if outcome.code == 0:
                break
            assert stamps(built.bundle()) == old
            assert built.leftovers() == []
            failed |= set(re.findall(r"^FAILED (\w+)", outcome.err, re.MULTILINE))
        assert {"fetch", "optimize"} <= failed
        assert built.run("check", "artifacts/net").code == 0
