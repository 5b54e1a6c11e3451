"""What a pull fetches, what it takes from the bundle that was there, and what stands in its way."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import pytest

from ortprep.bundle.digest import DigestCache, digest_bytes
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.verification import check_bundle
from ortprep.errors import IntegrityError, NotPublishedError, RegistryError, RegistryUnavailableError
from ortprep.registry.catalogue import Catalogue, open_catalogue
from ortprep.registry.publish import publish
from ortprep.registry.pull import TIMEOUT_VARIABLE, PullRequest, pull, pull_cached
from ortprep.registry.references import VersionRef
from ortprep.registry.signatures import read_receipt, verify_bundle
from ortprep.transport.transfer import Download, with_retries
from tests.fakes import wait_for_a_tick
from tests.registry.builders import BARE, Made, Watched, make_part, read_tree, write_bundle, write_keys

DATA = os.urandom(3_000_000)
ENTRY = FileEntry("weights", len(DATA), digest_bytes(DATA))
LATEST = PullRequest(VersionRef("net", None))


@pytest.fixture
def kind():
    return "directory"


@pytest.fixture
def fetched(catalogue):
    """The paths of the files that are read of the registry from now on."""
    paths = []

    def note(name, *args):
        if name == "open_file":
            paths.append(args[1].path)

    catalogue.backend = Watched(catalogue.backend, note)
    return paths


class Source:
    """A registry of one file that may break off."""

    def __init__(self, data=DATA, cut_at=None):
        self.data, self.cut_at = data, cut_at
        self.offsets = []

    @contextmanager
    def open_file(self, part, entry, offset):
        self.offsets.append(offset)
        yield Download(self._blocks(offset), offset)

    def _blocks(self, offset):
        for start in range(offset, len(self.data), 100_000):
            if self.cut_at is not None and start >= self.cut_at:
                self.cut_at = None
                raise RegistryUnavailableError("cut")
            yield self.data[start : start + 100_000]


def test_a_download_that_breaks_off_goes_on_where_it_stopped(tmp_path):
    source, seen = Source(cut_at=1_000_000), []
    Catalogue(source).fetch_file(make_part("net", {"weights": DATA}), ENTRY, tmp_path, seen.append)
    assert (tmp_path / "weights").read_bytes() == DATA
    assert source.offsets == [0, 1_000_000]
    assert sum(seen) == ENTRY.size_bytes


@pytest.mark.attack
@pytest.mark.parametrize(
    "data",
    [DATA[:-1], DATA + b"x", DATA * 2, b"", DATA[:-1] + bytes([DATA[-1] ^ 1])],
    ids=["short", "long", "twice", "empty", "changed"],
)
def test_other_bytes_are_never_taken(tmp_path, data):
    with pytest.raises(IntegrityError):
        Catalogue(Source(data)).fetch_file(make_part("net", {"weights": DATA}), ENTRY, tmp_path)


def test_a_pull_fetches_nothing_of_what_is_there(catalogue, tmp_path, fetched):
    out, bundle = tmp_path / "out", write_bundle(tmp_path / "bundle")
    publish(bundle, catalogue)
    assert pull(LATEST, catalogue, out, hardware=BARE).fetched_bytes == sum(map(len, read_tree(out).values()))
    inode = out.stat().st_ino
    fetched.clear()
    again = pull(LATEST, catalogue, out, hardware=BARE)
    assert (again.fetched_bytes, fetched, out.stat().st_ino) == (0, [], inode)
    publish(write_bundle(tmp_path / "new", graph=b"new", spec=b"new"), catalogue)
    new = pull(LATEST, catalogue, out, hardware=BARE)
    assert set(fetched) == {"loader.json", "manifest.json", "portable/net_optimized.onnx"}
    assert read_tree(out) == read_tree(tmp_path / "new")
    assert read_receipt(out).version == new.version


def test_a_file_that_was_damaged_is_fetched_again(catalogue, tmp_path, fetched):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    out = pull(LATEST, catalogue, tmp_path / "out", hardware=BARE).path
    weights = out / "portable/net_optimized.onnx.data"
    weights.write_bytes(b"?" * weights.stat().st_size)
    fetched.clear()
    pull(LATEST, catalogue, out, hardware=BARE)
    assert set(fetched) == {"loader.json", "manifest.json", "portable/net_optimized.onnx.data"}
    assert read_tree(out) == read_tree(tmp_path / "bundle")


@pytest.mark.attack
def test_a_pull_that_verifies_believes_no_remembered_digest(catalogue, tmp_path):
    private, public = write_keys(tmp_path / "keys")
    publish(write_bundle(tmp_path / "bundle"), catalogue, private_key=private)
    signed = PullRequest(VersionRef("net", None), public_key=public)
    out = pull(signed, catalogue, tmp_path / "out", hardware=BARE).path
    weights = out / "portable/net_optimized.onnx.data"
    good = digest_bytes(weights.read_bytes())
    weights.write_bytes(b"?" * weights.stat().st_size)
    wait_for_a_tick(weights)
    DigestCache().record(weights, good)
    pull(signed, catalogue, out, hardware=BARE)
    assert read_tree(out) == read_tree(tmp_path / "bundle")


def test_files_of_the_same_content_are_fetched_once(catalogue, tmp_path, fetched):
    bundle = write_bundle(tmp_path / "bundle", made=(Made("cpu"), Made("portable")))
    publish(bundle, catalogue)
    fetched.clear()
    out = pull(LATEST, catalogue, tmp_path / "out", hardware=BARE).path
    assert len([path for path in fetched if path.endswith(".data")]) == 1
    assert read_tree(out) == read_tree(bundle)


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
    with open_catalogue(str(registry)) as catalogue:
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


def test_a_mount_point_is_refused_before_anything_is_fetched(catalogue, tmp_path, monkeypatch, fetched):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    out = tmp_path / "models"
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", out.__eq__)
    with pytest.raises(RegistryError, match="a bundle cannot replace a mount point") as caught:
        pull(LATEST, catalogue, out, hardware=BARE)
    assert caught.value.hint == f"--out {out}/net"
    assert fetched == []
    pull(LATEST, catalogue, out / "net", hardware=BARE)


def test_the_cache_has_what_load_pulled_and_asks_the_registry_which_version(registry, catalogue, tmp_path):
    bundle = write_bundle(tmp_path / "bundle")
    version = publish(bundle, catalogue, label="v1").version
    first = pull_cached(PullRequest(VersionRef("net", "v1")), catalogue, hardware=BARE)
    inode = first.path.stat().st_ino
    again = pull_cached(PullRequest(VersionRef("net", version.digest)), catalogue, hardware=BARE)
    assert (again.path, again.fetched_bytes, first.path.stat().st_ino) == (first.path, 0, inode)
    assert first.path.parent.stat().st_mode & 0o777 == 0o700
    Path(registry).rename(tmp_path / "gone")
    with pytest.raises(RegistryError), open_catalogue(registry) as other:
        pull_cached(PullRequest(VersionRef("net", "v1")), other, hardware=BARE)


@pytest.mark.parametrize("what", ["stale", "gone", "not mounted"])
def test_a_digest_that_was_pulled_needs_no_registry_that_can_be_reached(
    registry, catalogue, tmp_path, monkeypatch, caplog, what
):
    _, public = write_keys(tmp_path / "keys")
    version = publish(write_bundle(tmp_path / "bundle"), catalogue, label="v1").version
    reference = VersionRef("net", version.digest)
    pulled = pull_cached(PullRequest(reference), catalogue, hardware=BARE)

    if what == "not mounted":
        Path(registry).rename(tmp_path / "elsewhere")
        Path(registry).mkdir()
    elif what == "gone":
        Path(registry).rename(tmp_path / "elsewhere")
    else:

        def fail(*_, **__):
            raise OSError(errno.ESTALE, "stale file handle")

        monkeypatch.setattr("ortprep.transport.transfer.FIRST_PAUSE_S", 0.0)
        monkeypatch.setattr(catalogue.backend._folder._filesystem, "ls", fail)
    kind = RegistryUnavailableError if what == "stale" else NotPublishedError
    assert pull_cached(PullRequest(reference), catalogue, hardware=BARE).path == pulled.path
    assert "using what was pulled before" in caplog.text
    for request in (PullRequest(VersionRef("net", "v1")), PullRequest(reference, public_key=public)):
        with pytest.raises(kind):
            pull_cached(request, catalogue, hardware=BARE)
    (pulled.path / "golden.npz").write_bytes(b"damaged")
    with pytest.raises(kind):
        pull_cached(PullRequest(reference), catalogue, hardware=BARE)


def test_a_name_is_resolved_by_the_documents_of_its_versions_alone(catalogue, tmp_path):
    for label in ("v1", "v2"):
        publish(write_bundle(tmp_path / label, spec=label.encode()), catalogue, label=label)
    read = []
    backend = Watched(
        catalogue.backend, lambda name, *args: read.append(args[-1]) if name == "open_ref" else None
    )
    state = Catalogue(backend).read_state("net", "v1")
    assert [version.label for version in state.versions.values()] == ["v1"]
    assert [name.partition(".")[2] for name in read] == ["v1"]
    assert len(Catalogue(backend).read_state("net", "v3").versions) == 2


def test_what_is_unavailable_is_asked_again_and_told_in_the_end(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    errors = [RegistryUnavailableError("1"), RegistryUnavailableError("2"), None]
    errors[1].retry_after_s = 7.0

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


def test_a_cached_bundle_that_is_signed_later_counts_as_signed(catalogue, tmp_path):
    private, public = write_keys(tmp_path / "keys")
    bundle = write_bundle(tmp_path / "bundle")
    publish(bundle, catalogue)
    pull_cached(LATEST, catalogue, hardware=BARE)
    publish(bundle, catalogue, private_key=private)
    signed = pull_cached(PullRequest(VersionRef("net", None), public_key=public), catalogue, hardware=BARE)
    assert verify_bundle(signed.path, public).digest == signed.part


@pytest.mark.attack
def test_a_lock_that_another_process_never_gives_back_ends_with_the_pull(catalogue, tmp_path, monkeypatch):
    """It waits in its own time, and says for what; a bundle that is there needs no lock."""
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    monkeypatch.setenv(TIMEOUT_VARIABLE, "1")
    lock = tmp_path / ".tmp-out~lock"
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RegistryError, match="pull took too long: net"):
            pull(LATEST, catalogue, tmp_path / "out", hardware=BARE)
    pull(LATEST, catalogue, tmp_path / "out", hardware=BARE)
    assert not lock.exists()
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert pull(LATEST, catalogue, tmp_path / "out", hardware=BARE).fetched_bytes == 0


def no_locks(*_):
    raise OSError(errno.ENOLCK, "no locks available")


@pytest.mark.attack
@pytest.mark.parametrize("locks", [True, False])
def test_two_containers_that_pull_to_one_folder_at_once_both_get_it(catalogue, tmp_path, monkeypatch, locks):
    """Each has a cache of its own; where the folder has locks, the second one waits and fetches nothing."""
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    out = tmp_path / "shared" / "net"
    stale = [out.with_name(f".tmp-net~{digit * 16}") for digit in "0f"]
    for folder in stale:
        folder.mkdir(parents=True)
    os.utime(stale[0], (1, 1))
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    other = Catalogue(catalogue.backend)
    with ThreadPoolExecutor() as threads:
        pulls = []

        def meet(name, *_):
            if name == "open_file" and not pulls:
                monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "other cache"))
                pulls.append(threads.submit(pull, LATEST, other, out, hardware=BARE))
                wait(pulls, timeout=0.2 if locks else None)

        first = pull(LATEST, Catalogue(Watched(catalogue.backend, meet)), out, hardware=BARE)
    assert (pulls[0].result().fetched_bytes == 0) == locks
    assert first.fetched_bytes
    check_bundle(out)
    left = [] if locks else [stale[1], out.with_name(".tmp-net~lock")]
    assert sorted(out.parent.iterdir()) == [*left, out]


@pytest.mark.attack
def test_a_lock_that_another_user_made_is_not_waited_for(catalogue, tmp_path, monkeypatch):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with (tmp_path / ".tmp-out~lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        pull(LATEST, catalogue, tmp_path / "out", hardware=BARE)
    assert (tmp_path / ".tmp-out~lock").exists()
