"""What is kept on this machine of what was pulled."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.file_memory import is_settled, read_stamp
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.verification import check_bundle
from ortprep.errors import CacheError, IntegrityError, RegistryError, RegistryUnavailableError
from ortprep.registry import cache as cache_module
from ortprep.registry.cache import Cache
from ortprep.registry.catalogue import Catalogue, open_catalogue
from ortprep.registry.publish import publish
from ortprep.registry.pull import TIMEOUT_VARIABLE, PullRequest, pull_cached, resolve_version
from ortprep.registry.references import VersionRef
from ortprep.registry.signatures import verify_bundle
from ortprep.transport.transfer import Download, with_retries
from tests.registry.builders import BARE, Build, Made, read_tree, write_bundle, write_keys
from tests.registry.fault_proxy import fault_proxy

DATA = os.urandom(3_000_000)
ENTRY = FileEntry("weights", len(DATA), digest_bytes(DATA))


class Source:
    """A file in a registry that may break off."""

    def __init__(self, data=DATA, cut_at=None, error=RegistryUnavailableError):
        self.data, self.cut_at, self.error = data, cut_at, error
        self.offsets: list[int] = []

    @contextmanager
    def open(self, offset):
        self.offsets.append(offset)
        yield Download(self._blocks(offset), offset)

    def _blocks(self, offset):
        for start in range(offset, len(self.data), 100_000):
            if self.cut_at is not None and start >= self.cut_at:
                self.cut_at = None
                raise self.error("cut")
            yield self.data[start : start + 100_000]


def ignore(_):
    pass


def test_a_download_of_a_killed_process_goes_on_where_it_stopped(tmp_path):
    cache, source = Cache(tmp_path), Source(cut_at=1_000_000, error=KeyboardInterrupt)
    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        cache.fetch_file(ENTRY, source.open, ignore)
    source.cut_at = 2_000_000
    source.error = RegistryUnavailableError
    path = cache.fetch_file(ENTRY, source.open, seen.append)
    assert path.read_bytes() == DATA
    assert source.offsets == [0, 1_000_000, 2_000_000]
    assert sum(seen) == ENTRY.size_bytes


def test_a_rest_that_does_not_fit_is_thrown_away_and_fetched_anew(tmp_path):
    cache = Cache(tmp_path)
    other = Source(os.urandom(len(DATA)), cut_at=1_000_000, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.fetch_file(ENTRY, other.open, ignore)
    with pytest.raises(IntegrityError):
        cache.fetch_file(ENTRY, Source().open, ignore)
    assert cache.fetch_file(ENTRY, Source().open, ignore).read_bytes() == DATA


@pytest.mark.attack
@pytest.mark.parametrize(
    "data",
    [DATA[:-1], DATA + b"x", DATA * 2, b"", DATA[:-1] + b"?"],
    ids=["short", "long", "twice", "empty", "changed"],
)
def test_other_bytes_are_never_kept(tmp_path, data):
    if data == DATA:
        pytest.skip("the last byte is the same by chance")
    with pytest.raises(IntegrityError):
        Cache(tmp_path).fetch_file(ENTRY, Source(data).open, ignore)
    assert not [path for path in (tmp_path / "files").rglob("*") if path.is_file()]


def test_a_file_that_was_damaged_in_the_cache_is_fetched_again(tmp_path):
    cache = Cache(tmp_path)
    path = cache.fetch_file(ENTRY, Source().open, ignore)
    while not is_settled(read_stamp(path)):  # a write within the same tick would have the same stamp
        time.sleep(0.01)
    path.write_bytes(b"?" + DATA[1:])
    assert not cache.has_file(ENTRY)
    assert cache.fetch_file(ENTRY, Source().open, ignore).read_bytes() == DATA


@pytest.mark.attack
def test_documents_count_for_the_bound_of_the_cache(tmp_path):
    cache = Cache(tmp_path, limit_bytes=2_500_000)
    documents = [bytes([i]) * 1_000_000 for i in range(5)]
    for i, data in enumerate(documents):
        cache.write_document(data)
        path = tmp_path / "documents" / digest_bytes(data).removeprefix("sha256:")
        os.utime(path, (time.time() - 1000 + i, time.time() - 1000 + i))
    assert cache.read_document(digest_bytes(documents[0])), "it is used again"
    assert cache.trim(grace_s=0) >= 2_500_000
    kept = [cache.read_document(digest_bytes(data)) is not None for data in documents]
    assert kept == [True, False, False, False, True]


def test_a_cache_that_cannot_be_written_says_how_to_move_it(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match="cannot use the cache") as raised:
        Cache(tmp_path / "file" / "cache")
    assert "ORTPREP_CACHE_DIR" in str(raised.value.hint)


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path):
    """In a child whose files may not grow past a megabyte: what a full disk does to a write."""
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        "from ortprep.cli.app import run\n"
        "sys.argv = ['ortprep', 'pull', 'net', '--registry', sys.argv[1], '--out', sys.argv[2]]\n"
        "sys.exit(run())\n"
    )
    bundle = write_bundle(tmp_path / "bundle", made=(Made("portable", weights=DATA),))
    registry, out = tmp_path / "registry", tmp_path / "out"
    with open_catalogue(str(registry), cache=Cache(tmp_path / "c")) as catalogue:
        publish(bundle, catalogue)
    done = subprocess.run(
        [sys.executable, "-c", code, str(registry), str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert f"cannot write {out}" in done.stderr
    assert os.strerror(errno.EFBIG) in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("kind", ["oci"])
def test_without_the_registry_a_reference_names_what_it_named_last(registry, oci_url, tmp_path, caplog):
    cache = Cache(tmp_path / "cache")
    bundle = write_bundle(tmp_path / "bundle")
    with fault_proxy(oci_url) as proxy:
        url = registry.replace(oci_url.partition("://")[2], proxy.url.partition("://")[2])
        with open_catalogue(url, cache=cache) as catalogue:
            publish(bundle, catalogue, label="v1")
            online = pull_cached(PullRequest(VersionRef("net", "v1")), catalogue, hardware=BARE)
    with open_catalogue(url, cache=cache) as catalogue:
        offline = pull_cached(PullRequest(VersionRef("net", "v1")), catalogue, hardware=BARE)
        with pytest.raises(RegistryUnavailableError):
            pull_cached(PullRequest(VersionRef("net", "never-asked-for")), catalogue, hardware=BARE)
    assert offline.path == online.path
    assert read_tree(offline.path) == read_tree(bundle)
    assert "using the version that net@v1 named at" in caplog.text


@pytest.mark.attack
@pytest.mark.parametrize(
    ("kind", "variable"),
    [
        pytest.param("s3", "AWS_ENDPOINT_URL", marks=pytest.mark.slow),
        pytest.param("mlflow", "MLFLOW_TRACKING_URI", marks=pytest.mark.slow),
    ],
)
def test_what_one_server_named_is_not_taken_for_another(
    registry, kind, variable, model, tmp_path, monkeypatch
):
    url = "mlflow://" if kind == "mlflow" else registry
    if kind == "mlflow":
        monkeypatch.setenv(variable, registry.removeprefix("mlflow+"))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    cache = Cache(tmp_path / "cache")
    with open_catalogue(url, cache=cache) as catalogue:
        publish(write_bundle(tmp_path / "bundle", Build(name=model)), catalogue, label="v1")
        pull_cached(PullRequest(VersionRef(model, "v1")), catalogue, hardware=BARE)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nobody listens there
    with open_catalogue(url, cache=cache) as catalogue, pytest.raises(RegistryUnavailableError):
        resolve_version(PullRequest(VersionRef(model, "v1")), catalogue)


@pytest.mark.attack
def test_a_registry_is_known_by_its_server_wherever_that_is_named(monkeypatch):
    known = []
    for server in ("http://127.0.0.1:8", "http://127.0.0.1:9"):
        for variable in ("AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI"):
            monkeypatch.setenv(variable, server)
        for url in ("s3://bucket/models", "mlflow://"):
            with open_catalogue(url) as catalogue:
                known.append((catalogue.backend.url, catalogue.backend.read_server()))
    assert len(set(known)) == 4
    assert known[3] == ("mlflow+http://127.0.0.1:9", "")


@pytest.mark.parametrize("kind", ["directory"])
def test_a_version_named_by_its_digest_needs_no_registry(registry, catalogue, tmp_path):
    published = publish(write_bundle(tmp_path / "bundle"), catalogue)
    wanted = PullRequest(VersionRef("net", published.version.digest))
    first = pull_cached(wanted, catalogue, hardware=BARE)
    Path(registry).rename(tmp_path / "gone")
    inode = first.path.stat().st_ino
    again = pull_cached(wanted, catalogue, hardware=BARE)
    assert (again.path, again.fetched_bytes) == (first.path, 0)
    assert first.path.stat().st_ino == inode, "it was not put together again"


def test_what_is_unavailable_is_asked_again_and_told_in_the_end(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    errors = [RegistryUnavailableError("1"), RegistryUnavailableError("2"), None]
    errors[1].retry_after_s = 7.0  # type: ignore[union-attr]

    def action():
        error = errors.pop(0)
        if error is not None:
            raise error
        return "done"

    assert with_retries(action) == "done"
    assert pauses[0] < 1
    assert pauses[1] == 7.0
    with pytest.raises(RegistryUnavailableError):
        with_retries(lambda: (_ for _ in ()).throw(RegistryUnavailableError("always")))
    assert len(pauses) == 5


@pytest.mark.parametrize("kind", ["directory"])
def test_the_cache_is_bounded_with_its_bundles_and_keeps_what_a_process_uses(catalogue, tmp_path):
    cache = Cache(tmp_path / "small", limit_bytes=1_500_000)
    own = Catalogue(catalogue.backend, cache)
    paths = []
    for i in range(3):
        weights = os.urandom(1_000_000)
        made = (Made("portable", weights=weights),)
        publish(write_bundle(tmp_path / str(i), made=made, spec=bytes([i])), catalogue, label=f"v{i}")
        child = (
            "import sys; from pathlib import Path\n"
            "from ortprep.registry.cache import Cache\n"
            "from ortprep.registry.catalogue import Catalogue\n"
            "from ortprep.registry.pull import *\n"
            "from ortprep.registry.references import *\n"
            "from ortprep.registry.pull import *\n"
            "own = Catalogue(open_registry(sys.argv[1]), Cache(Path(sys.argv[2])))\n"
            "print(pull_cached(PullRequest(VersionRef('net', sys.argv[3])), own).path)\n"
        )
        arguments = [sys.executable, "-c", child, catalogue.backend.url, str(cache.root), f"v{i}"]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=600)
        paths.append(Path(done.stdout.strip()))
    (cache.root / "bundles/.tmp-left").mkdir()
    kept = pull_cached(PullRequest(VersionRef("net", "v0")), own, hardware=BARE).path
    assert kept == paths[0]
    for path in cache.root.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    os.sync()  # until then, the kernel may count fewer blocks than the files will take
    cache.trim()
    assert [path.exists() for path in paths] == [True, False, False]
    assert not (cache.root / "bundles/.tmp-left").exists()
    on_disk = {path.stat().st_ino: path.stat().st_size for path in cache.root.rglob("*") if path.is_file()}
    assert sum(on_disk.values()) < 1_500_000


@pytest.mark.parametrize("kind", ["directory"])
def test_a_cached_bundle_that_is_signed_later_counts_as_signed(catalogue, tmp_path):
    private, public = write_keys(tmp_path / "keys")
    bundle = write_bundle(tmp_path / "bundle")
    publish(bundle, catalogue)
    pull_cached(PullRequest(VersionRef("net", None)), catalogue, hardware=BARE)
    publish(bundle, catalogue, private_key=private)
    signed = pull_cached(PullRequest(VersionRef("net", None), public_key=public), catalogue, hardware=BARE)
    assert verify_bundle(signed.path, public).digest == signed.part


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["directory"])
@pytest.mark.parametrize("lock", ["file", "folder", "use"])
def test_a_lock_that_another_process_never_gives_back_ends_with_the_pull(
    catalogue, tmp_path, monkeypatch, lock
):
    """It waits in its own time, and says for what."""
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    request = PullRequest(VersionRef("net", None))
    pull_cached(request, catalogue, hardware=BARE)
    shutil.rmtree(catalogue.cache.root / "files")
    shutil.rmtree(catalogue.cache.root / "bundles")
    Cache(catalogue.cache.root)
    for handle in cache_module._kept.values():
        os.close(handle)
    cache_module._kept.clear()
    monkeypatch.setenv(TIMEOUT_VARIABLE, "1")
    with ExitStack() as stack:
        for stripe in range(256):
            path = catalogue.cache.root / "locks" / f"{lock}-{stripe:02x}"
            fcntl.flock(stack.enter_context(path.open("ab")), fcntl.LOCK_EX)
        with pytest.raises(RegistryError, match="pull took too long: net"):
            pull_cached(request, catalogue, hardware=BARE)
    monkeypatch.delenv(TIMEOUT_VARIABLE)
    check_bundle(pull_cached(request, catalogue, hardware=BARE).path)
