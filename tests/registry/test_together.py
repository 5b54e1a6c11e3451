"""Publishers, pullers, collections and promotions at the same time, and a promotion that was cut off."""

import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ortprep.bundle.verification import check_bundle
from ortprep.errors import ConflictError, NotPublishedError, PipelineError
from ortprep.registry.backend import Kind
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.documents import build_version
from ortprep.registry.garbage_collection import RetentionPolicy, choose_kept, collect
from ortprep.registry.promotion import promote, rollback
from ortprep.registry.publish import publish
from ortprep.registry.pull import PullRequest, pull, pull_cached
from ortprep.registry.references import VersionRef, open_registry
from ortprep.registry.signatures import verify_bundle
from tests.registry.builders import (
    BARE,
    HERE,
    Build,
    Made,
    Watched,
    list_versions,
    put_version,
    read_tree,
    write_bundle,
    write_keys,
)

NOTHING = RetentionPolicy(keep_latest=0, keep_days=0, grace_hours=0)
PATIENT = RetentionPolicy(keep_latest=0, keep_days=0)
"""Removes every version that nothing names, and files as soon as nobody can be publishing them."""


@pytest.fixture
def kind():
    return "directory"


def interposed(registry, call, action):
    """A catalogue whose backend does something just before one of its calls: the worst moment for it.

    The call is named `METHOD`, or `METHOD KIND` with the kind of its refs. Also returns the calls so far.
    """
    calls = []
    method, _, kind = call.partition(" ")

    def act(name, *args):
        if name == method and (not kind or kind in args):
            calls.append(args)
            if len(calls) == 1:
                action()

    return Catalogue(Watched(open_registry(registry), act)), calls


def age(registry):
    """Makes every file of a registry older than any grace period."""
    for path in Path(registry).rglob("*"):
        os.utime(path, (1, 1))


@pytest.mark.parametrize(
    "method", ["has_file", "put_file", "put_ref parts", "put_ref versions", "list_refs versions"]
)
def test_a_collection_in_the_middle_of_publishing_spares_what_is_published(
    registry, catalogue, tmp_path, method
):
    weights = b"shared weights" * 100
    old = Build((Made("portable", weights=weights),), spec=b"old")
    publish(write_bundle(tmp_path / "old", old), catalogue, label="old")
    age(registry)
    new = write_bundle(tmp_path / "new", Build((Made("portable", weights=weights),), spec=b"new"))
    slow, calls = interposed(
        registry, method, lambda: collect("net", catalogue, policy=PATIENT, dry_run=False)
    )
    published = publish(new, slow)
    assert calls
    request = PullRequest(VersionRef("net", published.version.digest))
    pull(request, catalogue, tmp_path / "out", hardware=BARE)
    assert read_tree(tmp_path / "out") == read_tree(new)


def test_a_part_that_a_collection_removes_before_its_version_is_there_is_written_again(
    registry, catalogue, tmp_path
):
    def remove():
        for path in Path(registry, "net/parts").iterdir():
            path.unlink()

    slow, calls = interposed(registry, "put_ref versions", remove)
    published = publish(write_bundle(tmp_path / "bundle"), slow)
    assert calls
    request = PullRequest(VersionRef("net", published.version.digest))
    fresh = Catalogue(catalogue.backend)
    pull(request, fresh, tmp_path / "out", hardware=BARE)


@pytest.mark.attack
def test_a_publisher_leaves_out_a_part_that_is_gone(registry, catalogue, tmp_path):
    """A collection removed it a moment ago with its version, or the store lost it."""
    for day in (1, 2):
        build = Build((Made("portable", weights=bytes([day])),), created_at=f"2026-11-0{day}T00:00:00+00:00")
        publish(write_bundle(tmp_path / str(day), build), catalogue, label=str(day))
    age(registry)
    new = write_bundle(tmp_path / "3", Build((Made("portable"),), created_at="2026-11-03T00:00:00+00:00"))
    policy = RetentionPolicy(keep_latest=1, keep_days=0)
    slow, calls = interposed(
        registry, "open_ref parts", lambda: collect("net", catalogue, policy=policy, dry_run=False)
    )
    published = publish(new, slow, label="3")
    assert calls
    assert [part.digest for part in published.version.parts] == [published.part]
    assert set(list_versions(catalogue.backend, "net")) >= {published.version.digest}


def test_a_puller_whose_version_is_collected_leaves_nothing(registry, catalogue, tmp_path):
    publish(write_bundle(tmp_path / "bundle", made=(Made("portable", weights=os.urandom(1000)),)), catalogue)
    slow, calls = interposed(
        registry, "open_ref", lambda: collect("net", catalogue, policy=NOTHING, dry_run=False)
    )
    with pytest.raises(NotPublishedError):
        pull(PullRequest(VersionRef("net", None)), slow, tmp_path / "out", hardware=BARE)
    assert calls
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    "method", ["list_refs versions", "list_refs aliases", "list_refs previous", "delete_version", "sweep"]
)
def test_a_promotion_in_the_middle_of_a_collection_holds_or_fails_and_never_dangles(
    registry, catalogue, tmp_path, method
):
    version = publish(write_bundle(tmp_path / "bundle"), catalogue, label="v1").version
    outcome = []

    def try_to_promote():
        try:
            promote(VersionRef("net", "v1"), "production", catalogue)
            outcome.append(None)
        except PipelineError as error:
            outcome.append(error)

    slow, _ = interposed(registry, method, try_to_promote)
    collect("net", slow, policy=NOTHING, dry_run=False)
    state = catalogue.read_state("net")
    if outcome == [None] and version.digest in state.versions:
        pull(PullRequest(VersionRef("net", "production")), catalogue, tmp_path / "out", hardware=BARE)
    else:
        with pytest.raises(NotPublishedError):
            pull(PullRequest(VersionRef("net", "production")), catalogue, tmp_path / "out", hardware=BARE)
    # Between the last look at an alias and a removal there is one request.
    assert (outcome == [None]) or isinstance(outcome[0], NotPublishedError)
    assert version.digest in state.versions or method not in ("list_refs versions", "list_refs aliases")


def test_two_promotions_at_once_tell_the_one_that_lost(registry, catalogue, tmp_path):
    for i in range(2):
        publish(write_bundle(tmp_path / str(i), spec=bytes([i])), catalogue, label=f"v{i}")
    winner = catalogue.read_state("net").holders("v1")[0]

    def overtake(name, *args):
        if name == "put_ref" and Kind.ALIAS in args:
            catalogue.backend.put_ref("net", Kind.ALIAS, "production", winner.data)

    backend = Watched(open_registry(registry), after=overtake)
    with pytest.raises(ConflictError, match="another process moves net@production"):
        promote(VersionRef("net", "v0"), "production", Catalogue(backend))
    assert catalogue.read_state("net").aliases == {"production": winner.digest}


@pytest.mark.attack
@pytest.mark.parametrize("serving", [True, False])
def test_no_version_gets_by_the_gate_while_the_alias_moves(registry, catalogue, tmp_path, serving):
    for label, steady_ms in (("old", 50.0), ("slow", 50.0), ("fast", 5.0)):
        made = (Made("cpu", HERE, steady_ms=steady_ms),)
        publish(write_bundle(tmp_path / label, spec=label.encode(), made=made), catalogue, label=label)
    fast = catalogue.read_state("net").holders("fast")[0]
    if serving:
        promote(VersionRef("net", "old"), "production", catalogue)
    rival, calls = interposed(
        registry,
        "open_file",  # the gate reads figures, and has seen what the alias names
        lambda: promote(VersionRef("net", "fast"), "production", catalogue),
    )
    with pytest.raises(ConflictError, match="another process moves net@production"):
        promote(VersionRef("net", "slow"), "production", rival)
    assert calls
    assert catalogue.read_state("net").aliases == {"production": fast.digest}


def test_a_label_that_is_taken_meanwhile_is_an_error_and_nothing_is_lost(registry, catalogue, tmp_path):
    rival = publish(write_bundle(tmp_path / "other", spec=b"other"), catalogue, label="first")
    part = catalogue.read_part("net", rival.part)
    claim = build_version("net", [part], label="1.4", published_at="2026-11-23T00:00:00+00:00")
    slow, _ = interposed(registry, "put_ref versions", lambda: put_version(catalogue, claim))
    with pytest.raises(ConflictError, match=r"label taken: net@1\.4"):
        publish(write_bundle(tmp_path / "bundle"), slow, label="1.4")
    assert catalogue.read_state("net").labels["1.4"] == claim.digest


@pytest.mark.parametrize("taken_by", ["an alias", "another source"])
def test_a_label_that_is_taken_during_an_upload_is_never_written(registry, catalogue, tmp_path, taken_by):
    rival = publish(write_bundle(tmp_path / "other", spec=b"other"), catalogue, label="first")
    part = catalogue.read_part("net", rival.part)
    claim = build_version("net", [part], label="1.4", published_at="2026-11-23T00:00:00+00:00")

    def take():
        if taken_by == "an alias":
            promote(VersionRef("net", "first"), "1.4", catalogue)
        else:
            put_version(catalogue, claim)

    slow, _ = interposed(registry, "put_file", take)
    with pytest.raises(ConflictError, match=r"alias of net|label taken"):
        publish(write_bundle(tmp_path / "bundle"), slow, label="1.4")
    written = read_tree(Path(registry) / "net" / "versions")
    assert len(written) == (1 if taken_by == "an alias" else 2)


def test_pullers_at_the_same_time_fetch_each_file_once(registry, catalogue, tmp_path):
    publish(
        write_bundle(tmp_path / "bundle", made=(Made("portable", weights=os.urandom(500_000)),)), catalogue
    )
    opened = []

    def count(name, *args):
        if name == "open_file":
            opened.append(args[1].sha256)
            time.sleep(0.05)

    backend = Watched(open_registry(registry), count)
    paths = []

    def run():
        own = Catalogue(backend)
        paths.append(pull_cached(PullRequest(VersionRef("net", None)), own, hardware=BARE).path)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == len(set(opened))
    assert len(paths) == 6
    assert len(set(paths)) == 1
    check_bundle(paths[0])


_WHILE_PUBLISHING = ("has_file", "put_ref parts", "put_ref versions")


@pytest.mark.parametrize(
    ("signs", "method"),
    [
        *((True, method) for method in ("list_refs signatures", "put_ref signatures", *_WHILE_PUBLISHING)),
        *((False, method) for method in _WHILE_PUBLISHING),
    ],
)
def test_a_collection_meanwhile_loses_no_signature_that_is_made_or_asked_for(
    registry, catalogue, tmp_path, signs, method
):
    private, public = write_keys(tmp_path / "keys")
    bundle = write_bundle(tmp_path / "bundle")
    publish(bundle, catalogue, private_key=private)
    age(registry)
    slow, _ = interposed(registry, method, lambda: collect("net", catalogue, policy=PATIENT, dry_run=False))
    publish(bundle, slow, private_key=private if signs else None, public_key=public)
    pull(PullRequest(VersionRef("net", None), public_key=public), catalogue, tmp_path / "out", hardware=BARE)
    assert verify_bundle(tmp_path / "out", public).model == "net"


def test_a_signature_goes_after_its_part_and_no_sooner(registry, catalogue, tmp_path):
    """Else the signatures of removed parts would be more than a listing may have, in the end."""
    private, public = write_keys(tmp_path / "keys")
    for number in range(2):
        bundle = write_bundle(tmp_path / str(number), spec=bytes([number]))
        publish(bundle, catalogue, label=f"v{number}", private_key=private)
    promote(VersionRef("net", "v1"), "production", catalogue)
    collect("net", catalogue, policy=PATIENT, dry_run=False)
    assert len(catalogue.list_refs("net", Kind.SIGNATURE)) == 2, "within the grace period"
    age(registry)
    collect("net", catalogue, policy=PATIENT, dry_run=False)
    assert len(catalogue.list_refs("net", Kind.SIGNATURE)) == 1
    request = PullRequest(VersionRef("net", "production"), public_key=public)
    pull(request, catalogue, tmp_path / "out", hardware=BARE)


def test_after_a_promotion_that_was_killed_the_version_before_serves_and_stays(catalogue, tmp_path):
    first, second, third = (
        publish(write_bundle(tmp_path / str(i), spec=bytes([i])), catalogue, label=f"v{i}").version.digest
        for i in range(3)
    )
    promote(VersionRef("net", first), "production", catalogue)
    promote(VersionRef("net", second), "production", catalogue)

    def die(name, *args):
        if name == "put_ref" and Kind.ALIAS in args:
            raise KeyboardInterrupt

    dying = Watched(catalogue.backend, die)
    with pytest.raises(KeyboardInterrupt):
        promote(VersionRef("net", third), "production", Catalogue(dying))
    state = catalogue.read_state("net")
    assert state.aliases == {"production": second}
    previous = catalogue.list_refs("net", Kind.PREVIOUS)
    assert choose_kept(state, previous, NOTHING, now=datetime.now(UTC)) == {second}
    with pytest.raises(NotPublishedError, match="nothing to roll back to"):
        rollback("net", "production", catalogue)
    promote(VersionRef("net", third), "production", catalogue)
    assert rollback("net", "production", catalogue).version.digest == second
