"""What a registry in bad hands can send, and what is refused."""

import gzip
import itertools
import json
import os
import subprocess
import threading
import time
import traceback
import tracemalloc
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ortprep.bundle import paths
from ortprep.bundle.codec import canonical_json
from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import FileEntry, read_loader_config, write_loader_config
from ortprep.bundle.manifest import read_manifest, write_manifest
from ortprep.errors import (
    AccessDeniedError,
    BundleError,
    CacheError,
    ConflictError,
    IntegrityError,
    NotPublishedError,
    RegistryError,
)
from ortprep.registry import backend as backend_module
from ortprep.registry import catalogue as catalogue_module
from ortprep.registry import part_bundle
from ortprep.registry import publish as publishing
from ortprep.registry.backend import MAX_LISTING_BYTES, Kind, ref_name, subject_digits
from ortprep.registry.backends.http_client import HttpClient
from ortprep.registry.backends.mlflow import MlflowBackend
from ortprep.registry.backends.mlflow_server import MlflowServer
from ortprep.registry.backends.oci import OciBackend
from ortprep.registry.catalogue import Catalogue, open_catalogue
from ortprep.registry.documents import (
    MAX_DOCUMENT_BYTES,
    MAX_FILE_BYTES,
    build_version,
    parse_part,
    parse_version,
)
from ortprep.registry.garbage_collection import RetentionPolicy, collect
from ortprep.registry.part_bundle import read_part, small_files
from ortprep.registry.promotion import promote
from ortprep.registry.publish import publish
from ortprep.registry.pull import MAX_BYTES_VARIABLE, TIMEOUT_VARIABLE, PullRequest, pull, pull_cached
from ortprep.registry.references import VersionRef, open_registry, parse_reference, split_location
from ortprep.transport.fsspec_folder import FsspecFolder
from ortprep.transport.time_limit import OutOfTimeError, call_in_time, limit_time
from ortprep.transport.transfer import map_parallel, with_retries
from tests.registry.builders import (
    BARE,
    HERE,
    Made,
    machine_with_gpu,
    make_version,
    name_of,
    on_gpu,
    put_version,
    read_tree,
    write_bundle,
    write_ref,
)
from tests.registry.fault_proxy import Fault, fault_proxy

pytestmark = pytest.mark.attack

DIGEST = digest_bytes(b"")


@pytest.fixture
def kind():
    return "directory"


def pull_it(catalogue, out, version=None):
    return pull(PullRequest(VersionRef("net", version)), catalogue, out, hardware=BARE).version


def files_of(registry):
    """Files of the registry by name."""
    return {path.name: path for path in Path(registry, "net/blobs").rglob("*") if path.is_file()}


def tampered(part, change):
    """The document of a part as somebody with a tool of his own would write it."""
    document = json.loads(part.data)
    change(document)
    return canonical_json(document)


def put_document(catalogue, registry, part, data):
    """Puts another document of a part in the registry, and a version of it; returns the version's digest."""
    write_ref(registry, "net", Kind.PART, data)
    version = build_version("net", [part], label="evil", published_at="2030-01-01T00:00:00+00:00")
    document = json.loads(version.data)
    document["manifests"][0] |= {"digest": digest_bytes(data), "size": len(data)}
    write_ref(registry, "net", Kind.VERSION, canonical_json(document), "evil")
    return digest_bytes(canonical_json(document))


def put_copies(catalogue, registry, part, count, *, label="1", first=0, size_bytes=0):
    """Puts other documents of a part in the registry, padded to a size, and one version of them all."""
    summaries = []
    for number in range(first, first + count):
        data = canonical_json(json.loads(part.data) | {"number": number}).ljust(size_bytes)
        write_ref(registry, "net", Kind.PART, data)
        summaries.append({"digest": digest_bytes(data), "size": len(data)})
    version = json.loads(make_version(part, label, published_at="2030-01-01T00:00:00+00:00").data)
    version["manifests"] = [version["manifests"][0] | summary for summary in summaries]
    put_version(catalogue, parse_version(canonical_json(version)))


def add_layer(path, digest=DIGEST, size=0):
    layer = {"digest": digest, "size": size, "annotations": {"org.opencontainers.image.title": path}}
    return lambda document: document["layers"].append(layer)


def say(**fields):
    def change(document):
        own = json.loads(document["annotations"]["dev.ortprep.record"]) | fields
        document["annotations"]["dev.ortprep.record"] = json.dumps(own)

    return change


def test_one_changed_byte_in_any_file_is_always_noticed(registry, catalogue, tmp_path):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    for number, path in enumerate(files_of(registry).values()):
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with (
            open_catalogue(registry) as fresh,
            pytest.raises(IntegrityError, match="other bytes than recorded"),
        ):
            pull_it(fresh, tmp_path / f"out{number}")
        assert not (tmp_path / f"out{number}").exists()
        path.write_bytes(data)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_a_file_of_another_size_is_refused(registry, catalogue, tmp_path, change):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    path = files_of(registry)[digest_bytes(b"weights").removeprefix("sha256:")]
    path.write_bytes(change(path.read_bytes()))
    with open_catalogue(registry) as fresh, pytest.raises(IntegrityError):
        pull_it(fresh, tmp_path / "out")
    assert not (tmp_path / "out").exists()


OUTSIDE = ["../evil", "/etc/passwd", "a/../../evil", "a\\b", "", ".", "a//b", "a/./b", "a\0b", "x" * 2000]
RECEIPTS = [".registry/pulled.json", ".registry/part.json", ".registry/signatures/x.json", ".registry"]
OVERLAPPING = ["golden.npz/below", "portable/net_optimized.onnx/x"]
HIDDEN = [".git/config", "portable/.env", "portable/.git/hooks/post-checkout", ".x"]  # F28


@pytest.mark.parametrize("path", [*OUTSIDE, *RECEIPTS, *OVERLAPPING, *HIDDEN])
def test_a_path_that_no_bundle_has_is_refused(registry, catalogue, tmp_path, path):
    part = read_part(write_bundle(tmp_path / "bundle"))
    put_document(catalogue, registry, part, tampered(part, add_layer(path)))
    match = "path leaves its bundle" if path in OUTSIDE else "conflicting path"
    with pytest.raises(IntegrityError, match=match):
        pull_it(catalogue, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("digest", "size"),
    [
        ("md5:" + "0" * 32, 0),
        ("sha512:" + "0" * 128, 0),
        ("sha256:" + "0" * 63, 0),
        ("0" * 64, 0),
        (DIGEST, -1),
        (DIGEST, MAX_FILE_BYTES + 1),
        (DIGEST, 10**400),
        (DIGEST, 1.5),
        (DIGEST, True),
        (DIGEST, None),
    ],
)
def test_a_bad_digest_or_size_is_refused(registry, catalogue, tmp_path, digest, size):
    part = read_part(write_bundle(tmp_path / "bundle"))
    put_document(catalogue, registry, part, tampered(part, add_layer("a", digest, size)))
    with pytest.raises(IntegrityError, match=r"bad digest|bad size"):
        pull_it(catalogue, tmp_path / "out")


def test_numbers_of_thousands_of_digits_are_refused(tmp_path):
    part = read_part(write_bundle(tmp_path / "bundle"))
    huge = part.data.replace(b'"schemaVersion":2', b'"schemaVersion":' + b"9" * 5000)
    with pytest.raises(BundleError):
        parse_part(huge)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["layers"].pop(),
        add_layer("added"),
        say(source=DIGEST),
        say(spec=DIGEST),
        lambda document: document["annotations"].update(
            {name: text.replace('"gpu":""', '"gpu":"H200"') for name, text in document["annotations"].items()}
        ),
        lambda document: document["annotations"].update({"org.opencontainers.image.created": "2030"}),
    ],
)
def test_a_part_that_says_other_things_than_its_bundle_is_refused(registry, catalogue, tmp_path, change):
    bundle = write_bundle(tmp_path / "bundle")
    publish(bundle, catalogue)
    part = read_part(bundle)
    version = put_document(catalogue, registry, part, tampered(part, change))
    with pytest.raises(IntegrityError, match=r"contradicts its document|of another source or spec"):
        pull_it(catalogue, tmp_path / "out", version=version)


def test_a_part_that_is_refused_stops_no_machine_that_takes_another(registry, catalogue, tmp_path):
    gpu = write_bundle(tmp_path / "gpu", made=(Made("cuda", on_gpu(9, 0)),), spec=b"other")
    publish(gpu, catalogue)
    bad = tampered(read_part(gpu), add_layer("added"))
    write_ref(registry, "net", Kind.PART, bad)
    parts = [
        read_part(write_bundle(tmp_path / "cpu", made=(Made("cpu", HERE),), spec=b"other")),
        parse_part(bad),
    ]
    publish(tmp_path / "cpu", catalogue)
    version = build_version("net", parts, label="both", published_at="2030-01-01T00:00:00+00:00")
    put_version(catalogue, version)
    pull_it(catalogue, tmp_path / "out", version.digest)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "cpu")
    request = PullRequest(VersionRef("net", version.digest))
    with pytest.raises(IntegrityError, match="contradicts its document"):
        pull(request, catalogue, tmp_path / "no", hardware=machine_with_gpu((9, 0)))


def test_a_document_that_is_not_what_its_name_says_is_refused(registry, catalogue, tmp_path):
    published = publish(write_bundle(tmp_path / "bundle"), catalogue, label="good")
    other = publish(write_bundle(tmp_path / "other", spec=b"other"), catalogue, label="other")
    part, version = (Path(registry, "net", kind) for kind in (Kind.PART, Kind.VERSION))
    (part / ref_name(published.part)).write_bytes((part / ref_name(other.part)).read_bytes())
    with open_catalogue(registry) as fresh:
        with pytest.raises(IntegrityError, match="does not match its digest: parts/"):
            pull_it(fresh, tmp_path / "out", "good")
        (version / name_of(published.version)).write_bytes(other.version.data)
    with open_catalogue(registry) as fresh:
        assert list(fresh.read_state("net").labels) == ["other"]
        with pytest.raises(NotPublishedError):
            pull_it(fresh, tmp_path / "out", "good")


def test_a_document_of_a_gigabyte_is_not_read(registry, catalogue, tmp_path):
    published = publish(write_bundle(tmp_path / "bundle"), catalogue)
    for path in (Path(registry, "net/versions", "a" * 64), Path(registry, "net/aliases/large")):
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(2**30)
    tracemalloc.start()
    state = catalogue.read_state("net")
    assert tracemalloc.get_traced_memory()[1] < 8 * MAX_DOCUMENT_BYTES
    tracemalloc.stop()
    assert (list(state.versions), state.aliases) == ([published.version.digest], {})


def test_a_link_in_the_place_of_a_file_is_not_followed_out(registry, catalogue, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret!")
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    path = files_of(registry)[digest_bytes(b"weights").removeprefix("sha256:")]
    path.unlink()
    path.symlink_to(secret)
    with open_catalogue(registry) as fresh, pytest.raises(RegistryError, match="a link in the registry"):
        pull_it(fresh, tmp_path / "out")


@pytest.mark.parametrize("folder", ["blobs", "parts", "blobs/ab", "."])
def test_a_collection_removes_nothing_that_a_link_leads_to(registry, catalogue, tmp_path, folder):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    victim = tmp_path / "victim"
    place = Path(registry, "net", folder)
    own = [victim / "thesis/a.tex", victim / "blobs/thesis/a.tex", victim / ("ab" * 32)]
    for file in own:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("years of work")
    if place.exists():
        place.rename(tmp_path / "before")
    place.symlink_to(victim)
    with (
        pytest.raises(RegistryError, match="a link in the registry")
        if folder != "blobs/ab"
        else nullcontext()
    ):
        collect("net", catalogue, policy=RetentionPolicy(0, 0, grace_hours=0), dry_run=False)
    assert all(file.exists() for file in own)


def test_a_collection_removes_only_files_of_its_own_form(registry, catalogue, tmp_path):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    own = Path(registry, "net/blobs/thesis.tex")
    own.write_text("years of work")
    os.utime(own, (1, 1))
    collect("net", catalogue, policy=RetentionPolicy(0, 0, grace_hours=0), dry_run=False)
    assert own.exists()


def test_folders_too_deep_to_walk_through_keep_nothing_from_a_collection(registry, catalogue, tmp_path):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    unused = Path(registry, "net/blobs/ab", "ab" * 32)
    unused.parent.mkdir(exist_ok=True)
    unused.touch()
    os.utime(unused, (1, 1))
    handle = os.open(unused.parent, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deep", dir_fd=handle)
        handle, above = os.open("deep", os.O_RDONLY, dir_fd=handle), handle
        os.close(above)
    os.close(handle)
    try:
        collect("net", catalogue, policy=RetentionPolicy(0, 0, grace_hours=0), dry_run=False)
        assert not unused.exists()
    finally:
        # pytest could not remove them either
        subprocess.run(["rm", "-rf", unused.parent], check=True)


def test_a_collection_that_cannot_read_what_stays_removes_nothing(registry, catalogue, tmp_path):
    """Else a version with parts that nobody can read would have each collection end in its middle."""
    for day in (1, 2):
        publish(
            write_bundle(tmp_path / f"bundle{day}", created_at=f"2026-11-0{day}T00:00:00+00:00"), catalogue
        )
    before = catalogue.read_state("net").versions.keys()
    for path in Path(registry, "net/parts").iterdir():
        path.unlink()
    with open_catalogue(registry) as other, pytest.raises(NotPublishedError):
        collect("net", other, policy=RetentionPolicy(1, 0, grace_hours=0), dry_run=False)
    assert len(before) == 2
    assert catalogue.read_state("net").versions.keys() == before


@pytest.mark.parametrize("swapped", ["portable", "portable/net_optimized.onnx"])
def test_a_file_that_is_exchanged_for_a_link_while_it_is_published_is_not_sent(
    catalogue, tmp_path, monkeypatch, swapped
):
    bundle, private = write_bundle(tmp_path / "bundle"), tmp_path / "private"
    for path in bundle.glob("*/*"):
        copy = private / path.relative_to(bundle)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(b"s" * path.stat().st_size)
    sent, resolve = [], paths.resolve_inside

    def exchange(root, path):
        found = resolve(root, path)
        if path == "portable/net_optimized.onnx":
            (bundle / swapped).rename(tmp_path / "aside")
            (bundle / swapped).symlink_to(private / swapped)
        return found

    def put_file(part, entry, source):
        sent.append(source.read_bytes())
        return put(part, entry, source)

    put = catalogue.backend.put_file
    monkeypatch.setattr(catalogue.backend, "put_file", put_file)
    monkeypatch.setattr(paths, "resolve_inside", exchange)
    # One file after the other: none is looked for while the folder is neither there nor a link.
    monkeypatch.setattr(publishing, "map_parallel", lambda call, items: {item: call(item) for item in items})
    with pytest.raises(IntegrityError, match="path leaves its bundle"):
        publish(bundle, catalogue)
    assert not [data for data in sent if data.startswith(b"sss")]


@pytest.mark.parametrize("reader", ["check_bundle", "open_inside", "read_manifest", "read_loader_config"])
def test_a_bundle_that_is_replaced_while_it_is_published_is_published_whole_or_not(
    catalogue, tmp_path, monkeypatch, reader
):
    """Whichever of the reads `prepare` comes after."""
    old, live = write_bundle(tmp_path / "old"), write_bundle(tmp_path / "live")
    changes = {"made": (Made("cpu", HERE, weights=b"new"),), "created_at": "2026-11-21T00:00:00+00:00"}
    new = write_bundle(tmp_path / "new", **changes)
    publish(old, catalogue, label="old")
    read, done = getattr(part_bundle, reader), []

    def read_and_replace(*args, **kwargs):
        found = read(*args, **kwargs)
        if not done:
            live.rename(tmp_path / "aside")
            new.rename(live)
            done.append(True)
        return found

    monkeypatch.setattr(part_bundle, reader, read_and_replace)
    with suppress(IntegrityError):
        publish(live, catalogue, label="1.0")
    assert done
    for version in catalogue.read_state("net").versions.values():
        for part in version.parts:
            request = PullRequest(VersionRef("net", version.digest), part.digest)
            pull(request, catalogue, tmp_path / part.digest, hardware=BARE)
            assert read_tree(tmp_path / part.digest) in (read_tree(old), read_tree(live))


@pytest.mark.parametrize("damage", ["newer", "damaged"])
def test_a_collection_removes_no_file_of_a_version_that_it_cannot_read(registry, catalogue, tmp_path, damage):
    publish(write_bundle(tmp_path / "bundle"), catalogue, label="1.0")
    publish(write_bundle(tmp_path / "newer", source=b"2"), catalogue, label="2.0")
    (document,) = Path(registry, "net/versions").glob("*2.0")
    data = document.read_bytes()
    if damage == "damaged":
        document.write_bytes(data[:-1] + b" ")
    else:
        data = data.replace(b"vnd.ortprep.version.v1", b"vnd.ortprep.version.v2")
        document.unlink()
        document.with_name(ref_name(digest_bytes(data), "2.0")).write_bytes(data)
    before = read_tree(Path(registry, "net"))
    with open_catalogue(registry) as other:
        collect("net", other, policy=RetentionPolicy(1, 0, grace_hours=0), dry_run=False)
    assert read_tree(Path(registry, "net")) == before


@pytest.mark.parametrize("umask", [0o002, 0o000])
def test_nobody_else_can_reach_a_cached_file_whatever_the_umask(catalogue, tmp_path, umask):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    before = os.umask(umask)
    try:
        cached = pull_cached(PullRequest(VersionRef("net", None)), catalogue, hardware=BARE).path
    finally:
        os.umask(before)
    assert not cached.parent.stat().st_mode & 0o077


def test_a_publisher_writes_nothing_where_a_link_leads(registry, catalogue, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    Path(registry, "net").mkdir(parents=True)
    Path(registry, "net/blobs").symlink_to(victim)
    with pytest.raises(RegistryError, match="a link in the registry"):
        publish(write_bundle(tmp_path / "bundle"), catalogue)
    assert not list(victim.iterdir())


@pytest.mark.parametrize(
    "attack",
    [
        lambda folder, _: folder.write("net/keys/id", b"x"),
        lambda folder, source: folder.upload("net/keys/id", FileEntry("x", 1, digest_bytes(b"x")), source),
        lambda folder, _: folder.delete("net/keys/id"),
        lambda folder, _: folder.refresh("net/keys/id"),
        lambda folder, _: folder.read("net/keys/id", limit_bytes=9),
        lambda folder, _: folder.open("net/keys/id", 0, name="id").__enter__(),
    ],
)
def test_a_folder_that_becomes_a_link_after_it_was_checked_leads_nowhere(
    registry, tmp_path, monkeypatch, attack
):
    keys, victim, check = Path(registry, "net/keys"), tmp_path / "victim", FsspecFolder._locate
    for place in (keys, victim):
        place.mkdir(parents=True)
        (place / "id").write_bytes(b"secret")
        os.utime(place / "id", (1, 1))

    def check_then_exchange(folder, path):
        place = check(folder, path)
        if not keys.is_symlink():
            keys.rename(keys.with_name("before"))
            keys.symlink_to(victim)
        return place

    monkeypatch.setattr(FsspecFolder, "_locate", check_then_exchange)
    (source := tmp_path / "source").write_bytes(b"x")
    with pytest.raises(RegistryError):
        attack(FsspecFolder(registry), source)
    assert [(file.name, file.stat().st_mtime) for file in victim.iterdir()] == [("id", 1)]
    assert (victim / "id").read_bytes() == b"secret"


@pytest.mark.parametrize("kind", ["oci", pytest.param("mlflow", marks=pytest.mark.slow)])
def test_a_compressed_answer_is_neither_asked_for_nor_unfolded(registry, kind, request, tmp_path):
    upstream = request.getfixturevalue(f"{kind}_url")
    bomb = Fault(
        "status",
        status=200,
        headers={"Content-Encoding": "gzip"},
        body=gzip.compress(bytes(100_000_000)),
        times=9,
    )
    with fault_proxy(upstream) as proxy:
        url = registry.replace(upstream.partition("://")[2], proxy.url.partition("://")[2])
        proxy.faults = [bomb]
        with open_catalogue(url) as catalogue:
            with pytest.raises(RegistryError, match="got a compressed answer"):
                catalogue.read_state("net")
            assert proxy.headers
            assert all(headers["Accept-Encoding"] == "identity" for headers in proxy.headers)


def test_the_root_of_a_registry_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    with open_catalogue(str(tmp_path / "root")) as catalogue:
        published = publish(write_bundle(tmp_path / "bundle"), catalogue)
        assert pull_it(catalogue, tmp_path / "out") == published.version.digest


def test_a_link_and_a_folder_with_somebodys_own_files_are_not_replaced(catalogue, tmp_path):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    own, mine = write_bundle(tmp_path / "own"), tmp_path / "mine"
    mine.mkdir()
    for folder in (own, mine):
        (folder / "notes.txt").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "bundle")
    refusals = {own: r"notes\.txt", tmp_path / "link": "a link", mine: "something that is not a bundle"}
    for out, what in refusals.items():
        with pytest.raises(RegistryError, match=what):
            pull_it(catalogue, out)
    assert all((folder / "notes.txt").read_text() == "years of work" for folder in (own, mine))
    assert (tmp_path / "link").is_symlink()


# Names


@pytest.fixture
def two(catalogue, tmp_path):
    """Two versions, old and new, of which the new one is in production."""
    found = []
    for number, name in enumerate(("1.3", "1.4")):
        bundle = write_bundle(tmp_path / name, spec=bytes([number]))
        found.append(publish(bundle, catalogue, label=name).version)
    promote(VersionRef("net", "1.4"), "production", catalogue)
    return found


def test_an_alias_cannot_shadow_a_label_or_a_digest(catalogue, two, tmp_path):
    old, new = two
    for name in ("1.4", new.digest.removeprefix("sha256:")):
        with pytest.raises((ConflictError, RegistryError)):
            promote(VersionRef("net", "1.3"), name, catalogue)
    catalogue.backend.put_ref("net", Kind.ALIAS, "1.4", old.data)
    with pytest.raises(ConflictError, match=r"more than one version is called net@1\.4"):
        pull_it(catalogue, tmp_path / "out", version="1.4")
    short = new.digest.removeprefix("sha256:")[:12]
    with pytest.raises(NotPublishedError, match="a whole digest"):
        pull_it(catalogue, tmp_path / "short", version=short)
    for full in (new.digest, new.digest.removeprefix("sha256:")):
        assert pull_it(catalogue, tmp_path / f"full{len(full)}", version=full) == new.digest


@pytest.mark.parametrize("digits", [7, 12, 63])
def test_a_label_or_an_alias_that_reads_like_a_digest_is_refused(registry, catalogue, two, tmp_path, digits):
    old, new = two
    short = f"a{new.digest[8:]}"[:digits]  # at least one letter: numbers are allowed
    bundle = write_bundle(tmp_path / "other", spec=b"9")
    for name in (short, short.upper()):
        with pytest.raises(RegistryError, match="invalid label"):
            publish(bundle, catalogue, label=name)
        with pytest.raises(RegistryError, match="invalid alias name"):
            promote(VersionRef("net", "1.3"), name, catalogue)
    # A writer with a tool of his own.
    document = json.loads(old.data)
    document["annotations"]["org.opencontainers.image.version"] = short
    write_ref(registry, "net", Kind.VERSION, canonical_json(document), short)
    catalogue.backend.put_ref("net", Kind.ALIAS, short, old.data)
    with pytest.raises(NotPublishedError, match="a whole digest"):
        pull_it(catalogue, tmp_path / "out", version=short)


def test_a_date_and_a_number_are_labels(catalogue, tmp_path):
    for number, label in enumerate(("20261121", "202611210830", "1.4", "v7", "facade", "g1f2e3d4c")):
        bundle = write_bundle(tmp_path / label, spec=bytes([number]))
        version = publish(bundle, catalogue, label=label).version
        assert pull_it(catalogue, tmp_path / f"out{number}", version=label) == version.digest


@pytest.mark.parametrize("at", ["2020-01-01T00:00:00+00:00", "2036-01-01T00:00:00+00:00"])
def test_a_second_claim_of_a_label_is_an_error_however_it_is_dated(registry, catalogue, two, tmp_path, at):
    parts = [catalogue.read_part("net", part.digest) for part in two[0].parts]
    put_version(catalogue, build_version("net", parts, label="1.4", published_at=at))
    with pytest.raises(ConflictError, match=r"more than one version is called net@1\.4"):
        pull_it(catalogue, tmp_path / "out", "1.4")


# What lies on this machine


def test_a_cached_bundle_that_was_rewritten_is_not_opened(catalogue, tmp_path):
    version = publish(write_bundle(tmp_path / "bundle"), catalogue).version
    request = PullRequest(VersionRef("net", version.digest))
    cached = pull_cached(request, catalogue, hardware=BARE).path
    good = read_tree(cached)
    evil = write_bundle(tmp_path / "evil", made=(Made("portable", weights=b"evil"),))
    for name, data in read_tree(evil).items():
        (cached / name).unlink(missing_ok=True)
        (cached / name).write_bytes(data)
    assert pull_cached(request, catalogue, hardware=BARE).path == cached
    assert read_tree(cached) == good


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o702, None])
def test_a_cache_that_others_can_write_to_is_refused(catalogue, tmp_path, own_cache, mode):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    own_cache.mkdir(exist_ok=True)
    cache = own_cache / "registry"
    if mode is None:
        (tmp_path / "own").mkdir(mode=0o700)
        cache.symlink_to(tmp_path / "own")
    else:
        cache.mkdir()
        cache.chmod(mode)
    with pytest.raises(CacheError, match="cache is not safe to use"):
        pull_cached(PullRequest(VersionRef("net", None)), catalogue, hardware=BARE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_cache_of_another_user_is_refused(catalogue, tmp_path, own_cache):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    (own_cache / "registry").mkdir(parents=True, mode=0o700)
    os.chown(own_cache / "registry", 65534, 65534)
    with pytest.raises(CacheError, match="cache is not safe to use"):
        pull_cached(PullRequest(VersionRef("net", None)), catalogue, hardware=BARE)


def test_a_download_is_limited_in_size_and_time(catalogue, tmp_path, monkeypatch):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    monkeypatch.setenv(MAX_BYTES_VARIABLE, "100")
    with pytest.raises(RegistryError, match="too large: net"):
        pull_it(catalogue, tmp_path / "out")
    monkeypatch.setenv(MAX_BYTES_VARIABLE, "1000000")
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0")
    with pytest.raises(RegistryError, match="took too long"):
        pull_it(catalogue, tmp_path / "out")
    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    with pytest.raises(RegistryError, match="expected a whole number"):
        pull_it(catalogue, tmp_path / "out")
    monkeypatch.delenv(TIMEOUT_VARIABLE)
    pull_it(catalogue, tmp_path / "out")


def test_what_decides_which_part_is_pulled_is_in_its_document(catalogue, registry, tmp_path, monkeypatch):
    part = catalogue.read_part("net", publish(write_bundle(tmp_path / "bundle"), catalogue).part)
    put_copies(catalogue, registry, part, 40)
    read, fetch_records = [], Catalogue.fetch_records
    monkeypatch.setattr(Catalogue, "fetch_records", lambda *some: read.append(some) or fetch_records(*some))
    monkeypatch.setenv(MAX_BYTES_VARIABLE, str(part.summary.size_bytes - 1))
    with pytest.raises(RegistryError, match="too large: net"):
        pull_it(catalogue, tmp_path / "out", version="1")
    monkeypatch.setenv(MAX_BYTES_VARIABLE, str(part.summary.size_bytes))
    pull_it(catalogue, tmp_path / "out", version="1")
    assert len(read) == 1


@pytest.mark.parametrize("what", ["pull", "publish", "list"])
def test_pages_of_a_list_that_never_ends_are_limited_in_time(tmp_path, monkeypatch, what):
    numbers = itertools.count()

    def answer(*_, **__):
        time.sleep(0.05)
        link = f'</v2/m/net/tags/list?last={next(numbers)}>; rel="next"'
        return SimpleNamespace(headers={"Link": link}), b'{"tags": [], "repositories": []}'

    monkeypatch.setattr(HttpClient, "ask", answer)
    monkeypatch.setenv(TIMEOUT_VARIABLE, "1")
    if what != "pull":
        monkeypatch.setattr(catalogue_module, "LISTING_TIMEOUT_S", 1.0)
    with open_catalogue("oci+http://localhost:9/m") as catalogue:
        act, message = {
            "pull": (lambda: pull_it(catalogue, tmp_path / "out"), "pull took too long: net"),
            "publish": (lambda: publish(write_bundle(tmp_path / "b"), catalogue), "does not come to an end"),
            "list": (catalogue.list_models, "does not come to an end"),
        }[what]
        with pytest.raises(RegistryError, match=message):
            act()


def test_a_registry_that_does_not_answer_has_no_more_time_than_the_pull():
    begun_s = time.monotonic()

    def ask():
        call_in_time(lambda: time.sleep(10), 60)

    with limit_time(0.2, RegistryError("late")), pytest.raises(OutOfTimeError):
        map_parallel(lambda _: ask(), [1])
    with limit_time(0, RegistryError("late")), pytest.raises(RegistryError, match="late"):
        map_parallel(lambda _: with_retries(ask), [1])
    assert time.monotonic() - begun_s < 5


class EndlessStore(MemoryFileSystem):
    """A store whose lists do not end, as those of a server that always says that there is more."""

    ended = threading.Event()

    def ls(self, path, detail=True, **kwargs):
        self.ended.wait(60)
        raise OSError("the test is over")

    info = find = open = ls


def test_a_store_whose_lists_never_end_has_no_more_time_than_the_pull(monkeypatch):
    folder = FsspecFolder("memory://b/models")
    monkeypatch.setattr(folder, "_filesystem", EndlessStore())
    opened = ExitStack()
    for ask in (
        lambda: folder.list_names(""),
        lambda: folder.find(""),
        lambda: folder.describe_file("x"),
        lambda: opened.enter_context(folder.open("x", 0, name="x")),
    ):
        with limit_time(0.2, RegistryError("late")), pytest.raises(RegistryError, match="late"):
            ask()
    EndlessStore.ended.set()


@pytest.mark.attack
@pytest.mark.parametrize("token", ["s3cr3t\nX", "s3cr3t\u20ac"])
def test_a_login_that_no_header_takes_is_not_shown(token, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    with pytest.raises(AccessDeniedError, match="bad login") as raised:
        MlflowServer("mlflow+http://127.0.0.1:9").call("GET", "registered-models/search")
    assert "s3cr3t" not in "".join(traceback.format_exception(raised.value))
    refusal = {"error_code": "DENIED", "message": f"invalid credentials: Bearer {token}"}
    assert MlflowServer.read_reason(refusal) == "DENIED"


@pytest.mark.attack
@pytest.mark.parametrize("query", ["?sig=a/S3CRET", "?sig=a/S3CRET@v1", "#sig=S3CRET", "?a=/S3CRET#/S3CRET"])
@pytest.mark.parametrize("location", ["https://h/x/m@v1", "memory://x/m", "oci://h/x@v1", "registry://m@v1"])
def test_nothing_behind_a_reference_is_taken_for_one_or_shown(location, query):
    with pytest.raises(RegistryError, match="not a reference") as raised:
        split_location(location + query, registry="/srv")
    assert "S3CRET" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "../up", "a@", "a@b@c", "a/b", "a@" + "x" * 300, "-x", "a@../b"])
def test_a_reference_is_a_name_or_refused(text):
    with pytest.raises(RegistryError, match="not a reference") as raised:
        parse_reference(f"{text}?sig=S3CRET")
    assert "S3CRET" not in str(raised.value)
    with pytest.raises(RegistryError, match="not a reference"):
        parse_reference(text)


@pytest.mark.parametrize("login", ["user:hunter2", "user:hunter2/x", "user:x@hunter2", "u:hunter2?x"])
@pytest.mark.parametrize("scheme", ["https", "oci", "mlflow+https", "s3"])
def test_credentials_in_a_url_are_refused_and_not_shown(scheme, login):
    for opens in (open_registry, OciBackend if scheme == "oci" else open_registry):
        with pytest.raises(RegistryError) as raised:
            opens(f"{scheme}://{login}@host/x")
        assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "rest", ["https://user:hunter2@host", "http://hunter2@h", "http://h?t=hunter2", "http://", ""]
)
def test_a_bad_url_of_mlflow_is_refused_without_repeating_it(rest):
    with pytest.raises(RegistryError) as caught:
        MlflowBackend(f"mlflow+{rest}")
    assert "hunter2" not in str(caught.value)


def test_locations_name_a_registry_and_a_reference(monkeypatch):
    digest = "sha256:" + "0" * 64
    for location, expected in (
        ("oci://host:5000/team/net@1.4", ("oci://host:5000/team", VersionRef("net", "1.4"))),
        (f"file:///srv/net@{digest}", ("file:///srv", VersionRef("net", digest))),
    ):
        assert split_location(location) == expected
    with pytest.raises(RegistryError, match="no registry given"):
        split_location("registry://net")
    monkeypatch.setenv("ORTPREP_REGISTRY", "s3://bucket/models")
    production = VersionRef("net", "production")
    assert split_location("registry://net@production") == ("s3://bucket/models", production)
    assert split_location("registry://net@production", registry="/srv") == ("/srv", production)


FOREIGN = ["dodo.py", "Makefile", "configs/m", "portable/m.yaml", "portable/a/evil.PY", "portable/unlisted"]


@pytest.mark.parametrize("path", FOREIGN)
def test_f28_no_part_brings_a_spec_or_a_program(catalogue, tmp_path, monkeypatch, path):
    bundle = write_bundle(tmp_path / "bundle", extra={path: b"evil"})
    config, manifest = read_loader_config(bundle), read_manifest(bundle)
    if path != "portable/unlisted":
        entry = next(entry for entry in manifest.files if entry.path == path)
        variant = config.variants[0]._replace(files=(*config.variants[0].files, entry))
        write_loader_config(bundle, config._replace(variants=(variant,)))
        data = (bundle / "loader.json").read_bytes()
        files = [entry for entry in manifest.files if entry.path != "loader.json"]
        files.append(FileEntry("loader.json", len(data), digest_bytes(data)))
        write_manifest(bundle, replace(manifest, files=tuple(files)))
    with pytest.raises(IntegrityError, match=f"files that no bundle has .*\n.*got {path}"):
        publish(bundle, catalogue)
    with monkeypatch.context() as evil:
        evil.setattr(part_bundle, "check_bundle", lambda *_: None)
        publish(bundle, catalogue)
    with pytest.raises(IntegrityError, match=f"files that no bundle has .*\n.*got {path}"):
        pull_it(catalogue, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_documents_that_are_none_do_not_hide_the_others(registry, catalogue, tmp_path, caplog):
    version = publish(write_bundle(tmp_path / "bundle"), catalogue, label="good").version
    promote(VersionRef("net", "good"), "production", catalogue)
    nested = b'{"artifactType":"application/vnd.ortprep.version.v1","a":' + b"[" * 900 + b"]" * 900 + b"}"
    lone = version.data.replace(b'"good"', b'"\\ud800"')
    for number, data in enumerate((b"junk", b"{}", nested, lone, b"\xff")):
        write_ref(registry, "net", Kind.VERSION, data, f"bad{number}")
    Path(registry, "net/versions/junk").write_bytes(b"no digest in its name")
    Path(registry, "net/versions", "0" * 64).write_bytes(version.data)
    Path(registry, "net/aliases/bad").write_bytes(b"\xff")
    Path(registry, "net/aliases/dangling").write_text(DIGEST)
    assert list(catalogue.read_state("net").versions) == [version.digest]
    assert caplog.text.count("skipping a version") >= 4
    assert pull_it(catalogue, tmp_path / "out", version="production") == version.digest
    with pytest.raises(NotPublishedError, match="which does not exist"):
        pull_it(catalogue, tmp_path / "out", version="dangling")


def test_a_version_of_parts_of_another_model_is_refused(catalogue, tmp_path):
    other = publish(write_bundle(tmp_path / "other", name="other"), catalogue)
    part = catalogue.read_part("other", other.part)
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    document = json.loads(build_version("other", [part], label="x", published_at="2036").data)
    document["annotations"]["org.opencontainers.image.title"] = "net"
    evil = parse_version(canonical_json(document))
    catalogue.backend.put_ref("net", Kind.PART, ref_name(part.digest), part.data)
    put_version(catalogue, evil)
    with pytest.raises(IntegrityError, match="a part of another model"):
        pull_it(catalogue, tmp_path / "out", version="x")


def test_a_promotion_is_refused_where_what_serves_now_cannot_be_read(registry, two, tmp_path):
    old, new = two
    for path in Path(registry, "net", "versions").glob(f"{new.digest.removeprefix('sha256:')}*"):
        path.write_bytes(b"damaged")
    refused = pytest.raises(RegistryError, match=f"cannot read {new.digest}, which serves now")
    with open_catalogue(registry) as catalogue, refused:
        promote(VersionRef("net", old.digest), "production", catalogue)


@pytest.mark.parametrize("folder", ["versions", "aliases"])
def test_many_empty_files_hide_no_version_from_a_collection_of_garbage(
    registry, catalogue, two, monkeypatch, folder
):
    """A list that is cut left them out, and all that it did not name was removed."""
    monkeypatch.setattr(backend_module, "MAX_REFS", 10)
    for number in range(100):
        Path(registry, "net", folder, f"0{number:03}").touch()
    everything = RetentionPolicy(keep_latest=0, keep_days=0, grace_hours=0)
    _, new = two
    with nullcontext() if folder == "versions" else pytest.raises(RegistryError, match="too many aliases"):
        collect("net", catalogue, policy=everything, dry_run=False)
    for number in range(100):
        Path(registry, "net", folder, f"0{number:03}").unlink()
    assert new.digest in catalogue.read_state("net").versions
    assert catalogue.read_state("net").aliases == {"production": new.digest}


@pytest.mark.parametrize("folder", ["versions", "aliases", "signatures"])
def test_many_large_documents_are_not_read_into_memory(registry, catalogue, tmp_path, folder):
    """300 sparse files take no place in the registry, and 1.2 GB of who lists them."""
    published = publish(write_bundle(tmp_path / "bundle"), catalogue)
    place = Path(registry, "net", folder)
    place.mkdir(parents=True, exist_ok=True)
    for number in range(300):
        path = place / f"{number:064x}.{subject_digits(published.part)}"
        path.touch()
        os.truncate(path, MAX_DOCUMENT_BYTES)
    tracemalloc.start()
    try:
        # Of an alias no more is read than a digest has.
        with nullcontext() if folder == "aliases" else pytest.raises(RegistryError, match="too many bytes"):
            catalogue.read_signatures(catalogue.read_parts(*catalogue.read_state("net").versions.values())[0])
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_LISTING_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("versions", "parts", "act"),
    [
        (1, 40, lambda catalogue, folder: pull_it(catalogue, folder / "out")),
        (20, 1, lambda catalogue, _: collect("net", catalogue)),
        (20, 1, lambda catalogue, folder: publish(folder / "bundle", catalogue)),
    ],
    ids=["pull", "collect", "publish"],
)
def test_the_parts_of_versions_are_read_up_to_a_bound(registry, catalogue, tmp_path, versions, parts, act):
    """Padded documents are valid, and cost a registry little: 40 of them are 160 MB of who reads them all."""
    part = read_part(write_bundle(tmp_path / "bundle"))
    for first in range(versions):
        put_copies(
            catalogue, registry, part, parts, label=f"{first}", first=first, size_bytes=MAX_DOCUMENT_BYTES
        )
    with pytest.raises(RegistryError, match="too many bytes in the parts"):
        act(catalogue, tmp_path)
    kept = sum(map(len, catalogue._documents.values()))
    assert kept < MAX_LISTING_BYTES + 2 * MAX_DOCUMENT_BYTES


def test_the_records_of_a_version_are_read_up_to_a_bound(catalogue, tmp_path):
    part = read_part(write_bundle(tmp_path / "bundle"))
    size = max(entry.size_bytes for entry in small_files(part).values())
    with pytest.raises(RegistryError, match="too many bytes in the records"):
        catalogue.read_manifests([part] * (MAX_LISTING_BYTES // size + 1))


@pytest.mark.parametrize("change", [{"machine": "x\x1b[2J"}, {"onnxruntime": {"minimum": "9" * 5000}}])
def test_requirements_that_no_bundle_has_are_refused(tmp_path, change):
    part = read_part(write_bundle(tmp_path / "bundle"))
    (variant,) = json.loads(json.loads(part.data)["annotations"]["dev.ortprep.record"])["variants"]
    variant["requirements"] |= change
    with pytest.raises(BundleError, match="bad variant in a document"):
        parse_part(tampered(part, say(variants=[variant])))


def test_the_parts_of_all_versions_are_read_in_time(registry, catalogue, tmp_path, monkeypatch):
    for number in range(10):
        publish(write_bundle(tmp_path / f"{number}", spec=b"%d" % number), catalogue)
    open_ref = catalogue.backend.open_ref

    def open_slowly(model, kind, name):
        time.sleep(0.3 if kind == Kind.PART else 0)
        return open_ref(model, kind, name)

    monkeypatch.setattr(catalogue_module, "LISTING_TIMEOUT_S", 1.0)
    monkeypatch.setattr(catalogue.backend, "open_ref", open_slowly)
    catalogue._documents.clear()
    with pytest.raises(RegistryError, match="does not come to an end"):
        collect("net", catalogue)


def test_the_variants_of_all_parts_are_compared_up_to_a_bound(catalogue, tmp_path, monkeypatch):
    published = publish(write_bundle(tmp_path / "bundle"), catalogue)
    part = catalogue.read_part("net", published.part)
    monkeypatch.setattr(catalogue_module, "MAX_TOTAL_VARIANTS", 3)
    assert len(catalogue.read_manifests([part] * 3)) == 3
    with pytest.raises(RegistryError, match="too many variants in 4 parts"):
        catalogue.read_manifests([part] * 4)


def test_a_path_of_many_folders_is_refused(registry, catalogue, tmp_path):
    part = read_part(write_bundle(tmp_path / "bundle"))
    parse_part(tampered(part, add_layer("a/" * 31 + "b")))
    with pytest.raises(IntegrityError, match="path"):
        parse_part(tampered(part, add_layer("a/" * 32 + "b")))


def test_a_pipe_in_the_place_of_a_document_is_not_waited_for(registry, catalogue, tmp_path):
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    os.mkfifo(Path(registry, "net/versions", "0" * 64))
    with pytest.raises(RegistryError, match="not a regular file"):
        catalogue.read_state("net")
