"""A digest is computed once per content, and never trusted past a change."""

import grp
import hashlib
import logging
import os
import pwd
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle import digest as digest_module
from ortprep.bundle.digest import (
    BlockDigest,
    DigestCache,
    digest_blocks,
    digest_bytes,
    digest_file,
    is_digest,
)
from ortprep.bundle.file_memory import (
    cache_folder,
    is_protected,
    is_settled,
    read_stamp,
    require_cache_folder,
    write_entry,
)
from ortprep.bundle.paths import is_safe_name, is_safe_path, resolve_inside
from ortprep.errors import CacheError, IntegrityError
from tests.fakes import wait_for_a_tick


@pytest.fixture
def cache(tmp_path):
    return DigestCache(tmp_path / "cache")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


def poison(cache, path):
    """Stores a wrong digest for the file as it is now; getting it back proves that the cache was used."""
    wrong = digest_bytes(b"not the content")
    cache.record(path, wrong)
    return wrong


def test_an_unchanged_file_is_not_hashed_again(cache, file, tmp_path):
    wrong = poison(cache, file)
    assert cache.digest(file) == wrong
    assert DigestCache(tmp_path / "cache").digest(file) == wrong


@pytest.mark.attack
def test_where_stamps_are_whole_seconds_a_change_within_one_is_seen(cache, file, monkeypatch):
    def read_coarse_stamp(path):
        *place, modified_ns, changed_ns = read_stamp(path)
        return (*place, modified_ns // 10**9 * 10**9, changed_ns // 10**9 * 10**9)

    monkeypatch.setattr(digest_module, "read_stamp", read_coarse_stamp)
    time.sleep(1.05 - time.time() % 1)
    file.write_bytes(b"before")
    time.sleep(0.1)
    assert cache.digest(file) == digest_bytes(b"before")
    file.write_bytes(b"after!")
    assert cache.digest(file) == digest_bytes(b"after!")
    second, later = 1_700_000_000_000_000_000, 1_700_000_002_100_000_000
    assert is_settled((1, 1, 1, second, second), later)


@pytest.mark.attack
def test_an_entry_of_another_user_is_not_believed(cache, file, tmp_path, monkeypatch):
    poison(cache, file)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    (entry,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    if os.getuid() == 0:
        os.chown(entry, 12345, -1)
    assert cache.digest(file) == digest_bytes(b"content")


@pytest.mark.attack
def test_another_file_put_in_place_while_hashing_is_never_remembered_for_the_first(tmp_path, file):
    good, evil, way = tmp_path / "good", tmp_path / "evil", tmp_path / "way"
    for folder, content in ((good, b"good"), (evil, b"evil")):
        folder.mkdir()
        (folder / "model").write_bytes(content)
    time.sleep(0.05)  # old enough to be remembered
    way.symlink_to(evil)

    def swap():
        way.unlink()
        way.symlink_to(good)

    cache = DigestCache(tmp_path / "cache", between_blocks=swap)
    assert cache.digest(way / "model") == digest_bytes(b"evil")
    assert cache.digest(evil / "model") == digest_bytes(b"evil")
    assert cache.digest(good / "model") == digest_bytes(b"good")


def test_hashing_ends_when_it_is_told_to(file):
    def stop():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        digest_file(file, between_blocks=stop)


@given(size=st.integers(0, 70), threads=st.integers(1, 4))
def test_the_digest_of_blocks_is_that_of_their_digests_in_order(tmp_path_factory, size, threads):
    path = tmp_path_factory.mktemp("blocks") / "file"
    data = bytes(range(size))
    path.write_bytes(data)
    digests = [hashlib.sha256(data[at : at + 16]).digest() for at in range(0, size, 16)]
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(digest_module, "BLOCK_BYTES", 16)
        assert BlockDigest(file).compute(threads) == digest_bytes(b"".join(digests))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_block_that_an_interrupt_took_is_never_left_out(file, threads):
    interrupted = []

    def interrupt_once():
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, file.open("rb") as opened:
        patch.setattr(digest_module, "BLOCK_BYTES", 1)
        blocks = BlockDigest(opened, interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            blocks.take_part()  # as the thread that waits for a comparison does
        with pytest.raises(InterruptedError):
            blocks.compute(threads)


@pytest.mark.attack
def test_the_digest_of_blocks_is_never_taken_for_that_of_the_file(cache, file):
    time.sleep(0.05)  # old enough to be remembered
    blocks = cache.digest_blocks(file)
    assert cache.digest(file) == digest_bytes(b"content") != blocks
    assert cache.digest_blocks(file) == blocks


def test_a_file_that_shrinks_while_its_blocks_are_hashed_is_an_error(file, monkeypatch):
    monkeypatch.setattr(digest_module, "BLOCK_BYTES", 2)
    with pytest.raises(OSError, match="fewer bytes"):
        digest_blocks(file, threads=1, between_blocks=lambda: os.truncate(file, 3))


def test_an_interrupt_that_comes_when_an_entry_is_in_place_is_not_lost(tmp_path, monkeypatch):
    replace = os.replace

    def replace_and_interrupt(*paths):
        replace(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_entry(str(tmp_path / "entry"), b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_hard_links_share_an_entry(cache, file):
    other = file.with_name("other")
    os.link(file, other)
    wrong = poison(cache, file)
    assert cache.digest(other) == wrong


@pytest.mark.attack
def test_a_change_of_the_same_size_with_its_time_set_back_is_noticed(cache, file):
    poison(cache, file)
    before = read_stamp(file)
    wait_for_a_tick(file)
    file.write_bytes(b"CONTENT")
    os.utime(file, ns=(before[3], before[3]))
    assert read_stamp(file)[3] == before[3]
    assert cache.digest(file) == digest_bytes(b"CONTENT")


@pytest.mark.parametrize("junk", [b"", b"junk", b"7 1 1 sha256:short", b"\xff\xfe\xff"])
def test_a_damaged_cache_costs_time_and_nothing_else(cache, file, tmp_path, junk):
    poison(cache, file)
    (entry,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    entry.write_bytes(junk)
    assert cache.digest(file) == digest_bytes(b"content")


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(file, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    assert DigestCache(blocked / "cache").digest(file) == digest_bytes(b"content")


@given(st.binary(max_size=4096))
def test_f4_digests_are_sha256_in_lower_case_hex(data):
    digest = digest_bytes(data)
    assert digest == "sha256:" + hashlib.sha256(data).hexdigest()
    assert is_digest(digest)


@given(st.text(max_size=80))
def test_f4_nothing_else_is_a_digest(text):
    assert not is_digest(text)


@given(st.text(max_size=20))
def test_f1_a_safe_name_is_one_component_and_never_climbs(name):
    if is_safe_name(name):
        assert name == os.path.basename(name)  # noqa: PTH119
        assert ".." not in name
        assert not name.startswith(".")


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "a\\b", "", "a..b", "a\n", "é", "a" * 129])
def test_f1_these_are_no_names(name):
    assert not is_safe_name(name)


@given(st.lists(st.sampled_from(["a", "b.c", "..", ".", "", "/", "\\", "\x00"]), max_size=5).map("/".join))
def test_f2_a_safe_path_stays_below_its_root(path):
    if is_safe_path(path):
        resolved = os.path.normpath(f"/some/bundle/{path}")
        assert resolved == f"/some/bundle/{path}"


def test_f3_links_are_resolved_before_they_are_judged(tmp_path):
    root = tmp_path / "bundle"
    root.mkdir()
    (root / "inside").write_text("x")
    (root / "link").symlink_to("inside")
    (root / "out").symlink_to(tmp_path)
    assert resolve_inside(root, "link") == str((root / "inside").resolve())
    with pytest.raises(IntegrityError):
        resolve_inside(root, "out/file")


# -- laws of the cache folder: nobody but its user and root decides what is found there


@pytest.fixture
def safe_cache(tmp_path, monkeypatch):
    """The cache folder, which is not there yet."""
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(folder))
    return folder


def let_others_write_above(safe_cache):
    safe_cache.mkdir(parents=True)
    safe_cache.parent.chmod(0o777)


def let_others_write(safe_cache):
    safe_cache.mkdir(parents=True)
    safe_cache.chmod(0o777)


def let_others_write_below(safe_cache):
    (safe_cache / "part").mkdir(parents=True)
    (safe_cache / "part").chmod(0o707)


def put_a_link(safe_cache):
    safe_cache.mkdir(parents=True)
    (safe_cache.parent / "elsewhere").mkdir()
    (safe_cache / "part").symlink_to(safe_cache.parent / "elsewhere")


def lead_through_a_folder_of_others(safe_cache):
    shared = safe_cache.parent / "shared"
    (shared / "cache").mkdir(parents=True)
    shared.chmod(0o777)
    safe_cache.symlink_to(shared / "cache")


def give_away(safe_cache):
    safe_cache.mkdir(parents=True)
    os.chown(safe_cache, 12345, 12345)


def give_away_above(safe_cache):
    safe_cache.mkdir(parents=True)
    os.chown(safe_cache.parent, 12345, 12345)


def put_a_link_of_another_user(safe_cache):
    (safe_cache.parent / "mine").mkdir(parents=True)
    safe_cache.symlink_to(safe_cache.parent / "mine")
    os.lchown(safe_cache, 12345, 12345)


NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to someone else")
UNSAFE = [
    let_others_write_above,
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
def test_a_cache_that_others_could_change_is_not_used(safe_cache, make, caplog):
    make(safe_cache)
    with caplog.at_level(logging.WARNING):
        assert cache_folder("part") is None
        assert cache_folder("part") is None
    assert [f"cache is not safe to use: {safe_cache}/part" in line for line in caplog.messages] == [True]
    with pytest.raises(CacheError, match="not safe to use") as raised:
        require_cache_folder("part")
    assert raised.value.hint is not None
    assert "export ORTPREP_CACHE_DIR=" in raised.value.hint


@pytest.mark.attack
def test_a_digest_in_a_cache_that_others_could_change_is_not_believed(safe_cache, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    DigestCache().record(file, digest_bytes(b"not the content"))
    assert DigestCache().digest(file) == digest_bytes(b"not the content"), "it was remembered"
    safe_cache.chmod(0o777)
    assert DigestCache().digest(file) == digest_bytes(b"content")


def test_a_cache_is_made_for_this_user_alone_whatever_the_umask(safe_cache):
    before = os.umask(0)
    try:
        assert cache_folder("part") == f"{safe_cache}/part"
        DigestCache().record(Path(__file__), digest_bytes(b""))
    finally:
        os.umask(before)
    folders = [safe_cache.parent, *(path for path in safe_cache.parent.rglob("*") if path.is_dir())]
    assert len(folders) > 4
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_a_cache_below_a_sticky_folder_or_behind_a_link_of_its_user_is_used(safe_cache):
    sticky = safe_cache.parent / "tmp"
    sticky.mkdir(parents=True)
    sticky.chmod(0o1777)
    safe_cache.symlink_to("../above/tmp/mine")
    (sticky / "mine").mkdir()
    assert require_cache_folder("part") == cache_folder("part") == f"{safe_cache}/part"
    assert (sticky / "mine" / "part").is_dir()


def test_a_cache_that_cannot_be_made_is_none_without_a_word(safe_cache, monkeypatch, caplog):
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


@pytest.mark.attack
def test_a_group_may_write_where_this_user_alone_is_in_it(tmp_path):
    """What a user makes with `umask 002`; an access control list shows in the group's bits as well."""
    user = pwd.getpwuid(os.geteuid())
    group = grp.getgrgid(user.pw_gid)
    has_own_group = group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}
    tmp_path.chmod(0o775)
    assert is_protected(str(tmp_path)) == has_own_group
    entries = ((1, 7, -1), (2, 7, 65534), (4, 5, -1), (16, 7, -1), (32, 5, -1))  # user 65534 has rwx
    os.setxattr(
        tmp_path,
        "system.posix_acl_access",
        struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries),
    )
    assert tmp_path.stat().st_mode & 0o777 == 0o775
    assert not is_protected(str(tmp_path))
    os.removexattr(tmp_path, "system.posix_acl_access")
    tmp_path.chmod(0o777)
    assert not is_protected(str(tmp_path))


@pytest.mark.attack
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another group")
def test_another_group_may_not_write(tmp_path):
    tmp_path.chmod(0o775)
    os.chown(tmp_path, -1, 65534)
    assert not is_protected(str(tmp_path))


def test_links_that_lead_in_a_circle_protect_nothing(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        is_protected(str(tmp_path / "one" / "x"))
