"""Laws of full digests: what is opened is what was hashed, whoever may write to the bundle."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.errors import CacheError, IntegrityError, LoadError
from ortprep.runtime import load, wait_steady
from tests.runtime.builders import batch_of, sample, weights_of, write_bundle, write_converted

pytestmark = pytest.mark.runtime

DATA = "cpu/linear_optimized.onnx.data"
MAPPED = SessionOptionsRecord("ORT_DISABLE_ALL", {}, {"session.disable_prepacking": "1"})
"""Weights are used where they are mapped."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bundle(tmp_path, cache):
    return write_bundle(
        tmp_path / "place" / "linear", options=MAPPED, first=SessionOptionsRecord("ORT_DISABLE_ALL")
    )


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[Callable[[], None]]:
    """Maps a file as its writer does; yields what changes its weights and leaves no trace in its stamp."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:

        def change() -> None:
            status = path.stat()
            memory[:] = weights_of(9).tobytes()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

        yield change


def is_right(session: onnxruntime.InferenceSession) -> bool:
    (answer,) = session.run(None, {"x": sample()})
    return np.allclose(answer, sample() @ weights_of(0), rtol=1e-4, atol=1e-5)


def let_others_write(bundle: Path) -> None:
    (bundle / DATA).chmod(0o666)


def let_a_group_replace(bundle: Path) -> None:
    (bundle / DATA).parent.chmod(0o770)


def let_a_group_replace_the_bundle(bundle: Path) -> None:
    bundle.parent.chmod(0o775)


def nothing(bundle: Path) -> None:
    """A process that has the file open, whatever its mode is now, is enough."""


@pytest.mark.attack
@pytest.mark.parametrize(
    "permit", [let_others_write, let_a_group_replace, let_a_group_replace_the_bundle, nothing]
)
def test_a_session_keeps_the_weights_that_were_hashed_whatever_a_writer_does_later(bundle, permit):
    permit(bundle)
    with mapped(bundle / DATA) as change:
        session = load(bundle, digests="full")
        assert is_right(session)
        change()
        assert is_right(session)
        with pytest.raises(IntegrityError, match="content"):
            load(bundle, digests="full")


@pytest.mark.attack
def test_weights_that_change_without_a_trace_never_get_into_the_second_phase(bundle):
    with mapped(bundle / DATA) as change:
        session = load(bundle, digests="full")
        assert is_right(session)
        change()
        with contextlib.suppress(IntegrityError, LoadError):
            wait_steady(session)
        assert is_right(session)


@pytest.mark.attack
def test_weights_that_change_without_a_trace_never_get_into_a_bucket(tmp_path, cache):
    folder = write_converted(tmp_path / "converted")
    data = folder / "cpu-batch4" / "linear_optimized.onnx.data"
    with mapped(data) as change:
        session = load(folder, digests="full")
        change()
        with pytest.raises(IntegrityError, match="cpu-batch4"):
            session.run(None, {"x": batch_of(4)})


@pytest.mark.parametrize("check", ["none", "golden"])
def test_copies_are_gone_once_the_session_exists(bundle, cache, check):
    let_others_write(bundle)
    session = load(bundle, digests="full", check=check)
    assert is_right(session)
    wait_steady(session)
    assert list((cache / "copies").iterdir()) == []


def test_copies_of_what_is_refused_are_gone_too(bundle, cache):
    let_others_write(bundle)
    (bundle / DATA).write_bytes(weights_of(9).tobytes())
    with pytest.raises(IntegrityError, match="content"):
        load(bundle, digests="full")
    assert list((cache / "copies").iterdir()) == []


def test_what_nobody_else_can_change_is_not_copied(bundle, cache):
    assert is_right(load(bundle, digests="full"))
    assert not cache.exists()


def test_without_a_cache_that_can_be_trusted_what_others_may_write_is_refused(bundle, cache):
    cache.mkdir()
    cache.chmod(0o777)
    assert is_right(load(bundle, digests="full"))
    let_others_write(bundle)
    with pytest.raises(CacheError, match="not safe to use"):
        load(bundle, digests="full")


def test_copies_that_a_killed_process_left_are_removed_and_those_in_use_stay(bundle, cache):
    let_others_write(bundle)
    for name in ("left", "used"):
        (cache / "copies" / name).mkdir(parents=True)
        (cache / "copies" / name / "weights").write_bytes(b"x")
        os.utime(cache / "copies" / name, (0, 0))
    handle = os.open(cache / "copies" / "used", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    load(bundle, digests="full")
    os.close(handle)
    assert [path.name for path in (cache / "copies").iterdir()] == ["used"]


def test_a_full_disk_is_told_as_one(bundle, cache):
    let_others_write(bundle)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(LoadError, match=r"cannot copy .*\n  expected space in"):
            load(bundle, digests="full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((cache / "copies").iterdir()) == []
