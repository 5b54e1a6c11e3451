"""Laws of the cache folder: nobody but its user and root decides what is found there."""

import logging
import os
from pathlib import Path

import pytest

from ortprep.bundle.digest import DigestCache, digest_bytes
from ortprep.bundle.file_memory import cache_folder, is_protected, require_cache_folder
from ortprep.errors import CacheError

pytestmark = pytest.mark.runtime


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache folder, which is not there yet."""
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(folder))
    return folder


def let_a_group_write_above(cache):
    cache.mkdir(parents=True)
    cache.parent.chmod(0o775)


def let_others_write(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)


def let_others_write_below(cache):
    (cache / "part").mkdir(parents=True)
    (cache / "part").chmod(0o707)


def put_a_link(cache):
    cache.mkdir(parents=True)
    (cache.parent / "elsewhere").mkdir()
    (cache / "part").symlink_to(cache.parent / "elsewhere")


def lead_through_a_folder_of_others(cache):
    shared = cache.parent / "shared"
    (shared / "cache").mkdir(parents=True)
    shared.chmod(0o777)
    cache.symlink_to(shared / "cache")


def give_away(cache):
    cache.mkdir(parents=True)
    os.chown(cache, 12345, 12345)


def give_away_above(cache):
    cache.mkdir(parents=True)
    os.chown(cache.parent, 12345, 12345)


def put_a_link_of_another_user(cache):
    (cache.parent / "mine").mkdir(parents=True)
    cache.symlink_to(cache.parent / "mine")
    os.lchown(cache, 12345, 12345)


NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to someone else")
UNSAFE = [
    let_a_group_write_above,
    let_others_write,
    let_others_write_below,
    put_a_link,
    lead_through_a_folder_of_others,
    *(
        pytest.param(made, marks=NEEDS_ROOT)
        for made in (give_away, give_away_above, put_a_link_of_another_user)
    ),
]


@pytest.mark.attack
@pytest.mark.parametrize("make", UNSAFE)
def test_a_cache_that_others_could_change_is_not_used(cache, make, caplog):
    make(cache)
    with caplog.at_level(logging.WARNING):
        assert cache_folder("part") is None
        assert cache_folder("part") is None
    assert [f"cache is not safe to use: {cache}/part" in line for line in caplog.messages] == [True]
    with pytest.raises(CacheError, match="not safe to use") as raised:
        require_cache_folder("part")
    assert raised.value.hint is not None
    assert "export ORTPREP_CACHE_DIR=" in raised.value.hint


@pytest.mark.attack
def test_a_digest_in_a_cache_that_others_could_change_is_not_believed(cache, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    DigestCache().record(file, digest_bytes(b"not the content"))
    assert DigestCache().digest(file) == digest_bytes(b"not the content"), "it was remembered"
    cache.chmod(0o777)
    assert DigestCache().digest(file) == digest_bytes(b"content")


def test_a_cache_is_made_for_this_user_alone_whatever_the_umask(cache):
    before = os.umask(0)
    try:
        assert cache_folder("part") == f"{cache}/part"
        DigestCache().record(Path(__file__), digest_bytes(b""))
    finally:
        os.umask(before)
    folders = [cache.parent, *(path for path in cache.parent.rglob("*") if path.is_dir())]
    assert len(folders) > 4
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_a_cache_below_a_sticky_folder_or_behind_a_link_of_its_user_is_used(cache):
    sticky = cache.parent / "tmp"
    sticky.mkdir(parents=True)
    sticky.chmod(0o1777)
    cache.symlink_to("../above/tmp/mine")
    (sticky / "mine").mkdir()
    assert require_cache_folder("part") == cache_folder("part") == f"{cache}/part"
    assert (sticky / "mine" / "part").is_dir()


def test_a_cache_that_cannot_be_made_is_none_without_a_word(cache, monkeypatch, caplog):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", os.devnull)
    assert cache_folder("part") is None
    assert caplog.messages == []
    with pytest.raises(CacheError, match="cannot use the cache"):
        require_cache_folder("part")


@pytest.mark.attack
def test_a_path_is_judged_by_where_it_leads_not_by_how_it_reads(tmp_path):
    (tmp_path / "shared" / "one").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "link").symlink_to("shared/one")
    for folder in (tmp_path, tmp_path / "shared"):
        (folder / "mine").mkdir()
    assert is_protected(f"{tmp_path}/mine")
    assert not is_protected(f"{tmp_path}/link/../mine"), "that is shared/mine"
    assert not is_protected(f"{tmp_path}/shared/one/..")


def test_links_that_lead_in_a_circle_protect_nothing(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        is_protected(str(tmp_path / "one" / "x"))
