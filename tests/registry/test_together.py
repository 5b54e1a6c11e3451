"""Publishers, pullers and collections at the same time."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.bundle.codec import canonical_json, encode
from pipeline.bundle.digest import digest_bytes
from pipeline.bundle.loader_config import FileEntry
from pipeline.bundle.verification import check_bundle
from pipeline.errors import ConflictError, IntegrityError, NotPublishedError, PipelineError, RegistryError
from pipeline.registry.backend import Block
from pipeline.registry.cache import Cache
from pipeline.registry.catalogue import Catalogue, open_catalogue
from pipeline.registry.choosing import ALL, Wanted
from pipeline.registry.collection import Policy, collect
from pipeline.registry.fsspec_folder import _is_ours
from pipeline.registry.parts import read_bundle_part
from pipeline.registry.promotion import promote
from pipeline.registry.publishing import Note, publish
from pipeline.registry.pulling import pull, pull_cached
from pipeline.registry.receipt import verify_bundle
from pipeline.registry.records import (
    ClaimRecord,
    CollectionRecord,
    PartRecord,
    RecordName,
    VersionRecord,
    record_digest,
)
from pipeline.registry.references import Reference, open_registry
from pipeline.registry.signatures import parse_signer, parse_verifier
from tests.registry.bundles import BARE, HERE, Build, Made, on_gpu, read_tree, write_bundle
from tests.registry.keys import write_keys
from tests.registry.oci_server import oci_server

NOTHING = Policy(keep_latest=0, keep_days=0)


@pytest.fixture
def kind() -> str:
    return "directory"


class Interposed:
    """A backend that does something just before one of its calls: the worst moment for it."""

    def __init__(self, registry: str, method: str, action: Callable[[], object]) -> None:
        self._backend = open_registry(registry)
        self._method, self._action = method, action
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if name != self._method:
            return value

        def interposed(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == 1:
                self._action()
            return value(*args, **kwargs)

        return interposed


def interposed(
    registry: str, tmp_path: Path, method: str, action: Callable[[], object]
) -> tuple[Catalogue, Interposed]:
    backend: Any = Interposed(registry, method, action)
    return Catalogue(backend, Cache(tmp_path / "interposed")), backend


def test_a_collection_in_the_middle_of_publishing_spares_what_is_published(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    weights = b"shared weights" * 100
    old = Build((Made("portable", weights=weights),), spec=b"old")
    publish(write_bundle(tmp_path / "old", old), catalogue, note=Note("old"))
    new = write_bundle(tmp_path / "new", Build((Made("portable", weights=weights),), spec=b"new"))
    for method in ("find_missing", "upload_file", "finish_part", "write_record", "mirror"):
        slow, backend = interposed(
            registry, tmp_path, method, lambda: collect("net", catalogue, policy=NOTHING, dry_run=False)
        )
        publish(new, slow, note=Note())
        assert backend.calls
        pull(Wanted(Reference("net", None), ALL), catalogue, tmp_path / f"out-{method}", hardware=BARE)
        assert read_tree(tmp_path / f"out-{method}") == read_tree(new)
        collect("net", catalogue, policy=NOTHING, dry_run=False)
        assert not catalogue.read_state("net").versions


def test_a_publisher_waits_for_a_collection_that_may_not_have_seen_it(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    name = catalogue.write_record("net", CollectionRecord(time.time(), "other"))
    bundle = write_bundle(tmp_path / "bundle")
    thread = threading.Thread(target=lambda: publish(bundle, catalogue))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert catalogue.read_state("net").versions == {}
    catalogue.delete_record("net", name)
    thread.join(30)
    assert len(catalogue.read_state("net").versions) == 1


def test_a_collection_that_died_does_not_hold_up_publishers_for_ever(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    catalogue.write_record("net", CollectionRecord(time.time() - 2 * 24 * 3600, "dead"))
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    assert len(catalogue.read_state("net").versions) == 1


def test_a_puller_whose_version_is_collected_leaves_nothing(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    publish(write_bundle(tmp_path / "bundle", made=(Made("portable", weights=os.urandom(1000)),)), catalogue)
    slow, backend = interposed(
        registry, tmp_path, "open_file", lambda: collect("net", catalogue, policy=NOTHING, dry_run=False)
    )
    with pytest.raises(NotPublishedError):
        pull(Wanted(Reference("net", None), ALL), slow, tmp_path / "out", hardware=BARE)
    assert backend.calls
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_promotion_in_the_middle_of_a_collection_waits_or_fails_and_never_dangles(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    version = publish(write_bundle(tmp_path / "bundle"), catalogue, note=Note("v1")).version
    outcome: list[BaseException | None] = []

    def try_to_promote() -> None:
        with open_catalogue(registry, cache=Cache(tmp_path / "own")) as own:
            try:
                promote(Reference("net", "v1"), "production", own)
                outcome.append(None)
            except PipelineError as error:
                outcome.append(error)

    threads: list[threading.Thread] = []

    def begin() -> None:
        threads.append(threading.Thread(target=try_to_promote))
        threads[0].start()
        time.sleep(0.3)

    slow, _ = interposed(registry, tmp_path, "list_files", begin)
    collect("net", slow, policy=NOTHING, dry_run=False)
    threads[0].join(30)
    state = catalogue.read_state("net")
    if outcome == [None]:
        assert state.aliases["production"].version == version.digest
        pull(Wanted(Reference("net", "production"), ALL), catalogue, tmp_path / "out", hardware=BARE)
    else:
        assert isinstance(outcome[0], NotPublishedError)
        assert not state.aliases
        assert not state.versions


def test_a_label_that_two_versions_claim_at_once_goes_to_one_of_them_at_most(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    other = publish(write_bundle(tmp_path / "other", spec=b"other"), catalogue, note=Note("first")).version
    bundle = write_bundle(tmp_path / "bundle")

    class Claiming(Interposed):
        def __getattr__(self, name: str) -> Any:
            value = getattr(self._backend, name)
            if name != "write_record":
                return value

            def write(model: str, record_name: Any, data: bytes) -> None:
                value(model, record_name, data)
                if record_name.kind == "claim":
                    catalogue.write_record("net", ClaimRecord("1.4", other.digest))

            return write

    backend: Any = Claiming(registry, "", lambda: None)
    with pytest.raises(ConflictError, match=r"label taken: net@1\.4"):
        publish(bundle, Catalogue(backend, Cache(tmp_path / "c")), note=Note("1.4"))
    assert "1.4" not in catalogue.read_state("net").labels


def test_pullers_at_the_same_time_fetch_each_file_once(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    publish(
        write_bundle(tmp_path / "bundle", made=(Made("portable", weights=os.urandom(500_000)),)), catalogue
    )
    opened: list[str] = []

    class Counting:
        def __init__(self) -> None:
            self._backend = open_registry(registry)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._backend, name)

        @contextmanager
        def open_file(
            self, model: str, part: PartRecord, entry: FileEntry, offset: int
        ) -> Iterator[Iterator[Block]]:
            opened.append(entry.sha256)
            time.sleep(0.05)
            with self._backend.open_file(model, part, entry, offset) as blocks:
                yield blocks

    backend: Any = Counting()
    paths: list[Path] = []

    def run() -> None:
        own = Catalogue(backend, Cache(tmp_path / "shared"))
        paths.append(pull_cached(Wanted(Reference("net", None), ALL), own, hardware=BARE).path)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == len(set(opened))
    assert len(paths) == 6
    assert len(set(paths)) == 1
    check_bundle(paths[0])


def test_records_of_one_bundle_are_equal_wherever_it_is_published(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    assert record_digest(read_bundle_part(bundle).record) == read_bundle_part(bundle).digest


def test_a_collection_just_before_signing_loses_no_signature(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    private, public = write_keys(tmp_path / "keys")
    signer, verifier = parse_signer(str(private)), parse_verifier(str(public))
    bundle = write_bundle(tmp_path / "bundle")
    publish(bundle, catalogue, signer=signer)
    for method in ("write_record", "list_records", "find_missing", "finish_part"):
        slow, _ = interposed(
            registry, tmp_path, method, lambda: collect("net", catalogue, policy=NOTHING, dry_run=False)
        )
        publish(bundle, slow, signer=signer, verifier=verifier)
        out = tmp_path / f"out-{method}"
        pull(Wanted(Reference("net", None), ALL, verifier), catalogue, out, hardware=BARE)
        assert verify_bundle(out, verifier).variants == ("portable",)


def test_a_label_that_a_merged_version_cannot_have_gets_a_number(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    cpu = write_bundle(tmp_path / "cpu", made=(Made("cpu", HERE),))
    cuda = write_bundle(tmp_path / "cuda", made=(Made("cuda", on_gpu(9, 0)),))
    versions = [publish(bundle, catalogue, note=Note("1.4")).version for bundle in (cpu, cuda, cuda)]
    assert [version.labels for version in versions] == [("1.4",), ("1.4-2",), ("1.4-2",)]
    with pytest.raises(ConflictError, match="label taken"):
        publish(write_bundle(tmp_path / "other", spec=b"other"), catalogue, note=Note("1.4"))
    assert len(catalogue.read_state("net").versions) == 2, "a label is looked at before anything is uploaded"


def test_a_damaged_file_in_the_registry_is_repaired_on_request(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    publish(bundle, catalogue)
    name = digest_bytes(b"weights").removeprefix("sha256:")
    (damaged,) = Path(registry).rglob(name)
    damaged.write_bytes(b"damaged")
    with pytest.raises(IntegrityError):
        pull(Wanted(Reference("net", None), ALL), catalogue, tmp_path / "out", hardware=BARE)
    publish(bundle, catalogue, repair=True)
    pull(Wanted(Reference("net", None), ALL), catalogue, tmp_path / "out", hardware=BARE)


def test_a_record_of_a_later_version_of_the_format_keeps_its_name(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    """A minor version may add fields; what names a part is what was written."""
    record = read_bundle_part(write_bundle(tmp_path / "bundle")).record
    data = canonical_json({"schema_version": "1.7", "added": 1, **encode(record)})
    part = RecordName("part", digest_bytes(data))
    catalogue.backend.write_record("net", part, data)
    catalogue.write_record("net", VersionRecord("net", record.source, record.spec, (part.digest,)))
    state = catalogue.read_state("net")
    assert len(state.versions) == 1
    assert set(state.parts) == {part.digest}


def test_a_collection_where_nothing_can_be_removed_holds_up_nobody(tmp_path: Path) -> None:
    with (
        oci_server(tmp_path / "server", delete=False) as server,
        open_catalogue(f"oci+{server.url}/team", cache=Cache(tmp_path / "c")) as own,
    ):
        publish(write_bundle(tmp_path / "bundle"), own)
        with pytest.raises(RegistryError, match="deletion is switched off"):
            collect("net", own, policy=NOTHING, dry_run=False)
        begun_s = time.monotonic()
        publish(write_bundle(tmp_path / "other", spec=b"other"), own)
        assert time.monotonic() - begun_s < 60


def test_a_collected_version_is_no_longer_shown_by_an_oci_registry(tmp_path: Path) -> None:
    with (
        oci_server(tmp_path / "server") as server,
        open_catalogue(f"oci+{server.url}/team", cache=Cache(tmp_path / "c")) as own,
    ):
        cpu = write_bundle(tmp_path / "cpu", made=(Made("cpu", HERE),))
        cuda = write_bundle(tmp_path / "cuda", made=(Made("cuda", on_gpu(9, 0)),))
        publish(cpu, own, note=Note("v1"))
        publish(cuda, own, note=Note("v2"))
        promote(Reference("net", "v2"), "production", own)
        collect("net", own, policy=NOTHING, dry_run=False)
        with urllib.request.urlopen(f"{server.url}/v2/team/net/tags/list", timeout=10) as answer:
            tags = set(json.loads(answer.read())["tags"])
        assert {tag for tag in tags if not tag.startswith("ortprep-")} == {"v2", "production"}
        pull(Wanted(Reference("net", "production"), ALL), own, tmp_path / "out", hardware=BARE)


def test_a_partial_upload_that_became_the_file_is_not_written_to(tmp_path: Path) -> None:
    """Opened before the other publisher put it in its place, locked after it had let go."""
    partial, place = tmp_path / "partial", tmp_path / "file"
    with partial.open("a+b") as late:
        partial.write_bytes(b"whole")
        partial.replace(place)
        assert not _is_ours(late, partial)
        partial.write_bytes(b"")
        assert not _is_ours(late, partial)
    with partial.open("a+b") as own:
        assert _is_ours(own, partial)
        with partial.open("a+b") as other:
            assert not _is_ours(other, partial)


def test_publishers_of_one_file_at_the_same_time_all_succeed(registry: str, tmp_path: Path) -> None:
    weights = os.urandom(3_000_000)
    bundles = [
        write_bundle(tmp_path / str(i), made=(Made("portable", weights=weights),), spec=bytes([i]))
        for i in range(6)
    ]

    def run(i: int) -> str:
        with open_catalogue(registry, cache=Cache(tmp_path / f"cache{i}")) as own:
            return publish(bundles[i], own).version.digest

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(run, range(6)))) == 6
    with open_catalogue(registry, cache=Cache(tmp_path / "check")) as own:
        pull(Wanted(Reference("net", None), ALL), own, tmp_path / "out", hardware=BARE)
    assert not list(Path(registry).rglob(".tmp-*"))
