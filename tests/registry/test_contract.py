"""What every kind of registry promises; one suite, bound to each of them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.bundle.loader_config import read_loader_config
from pipeline.bundle.manifest import read_manifest
from pipeline.bundle.verification import check_bundle
from pipeline.errors import (
    ConflictError,
    NotPublishedError,
    PromotionRefusedError,
    RegistryError,
    SignatureError,
)
from pipeline.registry.cache import Cache
from pipeline.registry.catalogue import Catalogue, open_catalogue
from pipeline.registry.choosing import ALL, Wanted
from pipeline.registry.collection import Policy, collect
from pipeline.registry.promotion import Gate, promote, rollback
from pipeline.registry.publishing import Note, Published, publish
from pipeline.registry.pulling import Pulled, pull, pull_cached
from pipeline.registry.references import Reference
from pipeline.registry.signatures import parse_signer, parse_verifier
from tests.registry.bundles import (
    ANY,
    BARE,
    ELSEWHERE,
    HERE,
    Build,
    Made,
    machine_with_gpu,
    on_gpu,
    read_tree,
    write_bundle,
)
from tests.registry.keys import write_keys

LATER, LATEST = "2026-11-21T00:00:00+00:00", "2026-11-22T00:00:00+00:00"
NOTHING = Policy(keep_latest=0, keep_days=0)


def pull_all(catalogue: Catalogue, out: Path, model: str, version: str | None = None) -> Pulled:
    return pull(Wanted(Reference(model, version), ALL), catalogue, out, hardware=BARE)


def publish_build(catalogue: Catalogue, folder: Path, build: Build, label: str | None = None) -> Published:
    return publish(write_bundle(folder, build), catalogue, note=Note(label))


def test_what_is_pulled_is_what_was_published(catalogue: Catalogue, model: str, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", name=model, made=(Made("cpu", HERE), Made("portable")))
    published = publish(bundle, catalogue)
    pulled = pull_all(catalogue, tmp_path / "out", model)
    assert read_tree(tmp_path / "out") == read_tree(bundle)
    assert pulled.version == published.version.digest
    check_bundle(tmp_path / "out")


def test_publishing_the_same_bundle_twice_changes_nothing(
    catalogue: Catalogue, model: str, tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "bundle", name=model)
    first = publish(bundle, catalogue)
    before = catalogue.read_state(model)
    second = publish(bundle, catalogue)
    assert catalogue.read_state(model) == before
    assert (second.version, second.uploaded_bytes, second.is_new) == (first.version, 0, False)
    assert first.is_new


def test_versions_that_share_weights_upload_them_once(
    catalogue: Catalogue, kind: str, model: str, tmp_path: Path
) -> None:
    if kind == "mlflow":
        pytest.skip("MLflow keeps the files of each version apart, so that they can be looked at")
    weights = os.urandom(400_000)
    publish_build(catalogue, tmp_path / "a", Build((Made("portable", weights=weights),), name=model))
    other = Build(
        (Made("portable", weights=weights),), name=model, graph=b"other", created_at=LATER, spec=b"other"
    )
    second = publish_build(catalogue, tmp_path / "b", other)
    assert second.uploaded_bytes < 10_000


def test_variants_of_one_source_and_spec_become_one_version(
    catalogue: Catalogue, model: str, tmp_path: Path
) -> None:
    builds = (
        Build((Made("cpu", HERE, b"one"), Made("portable", ANY, b"p")), name=model),
        Build((Made("cuda", on_gpu(9, 0), b"two"),), name=model, created_at=LATER),
        Build((Made("cuda", on_gpu(8, 6), b"three"),), name=model, created_at=LATEST),
    )
    published = [publish_build(catalogue, tmp_path / str(i), build) for i, build in enumerate(builds)]
    last = published[-1].version
    assert len(last.record.parts) == 3
    state = catalogue.read_state(model)
    assert state.versions[published[0].version.digest].superseded_by == last.digest
    pull_all(catalogue, tmp_path / "out", model)
    check_bundle(tmp_path / "out")
    config = read_loader_config(tmp_path / "out")
    assert [variant.target for variant in config.variants] == ["cuda", "cuda", "cpu", "cpu"]
    assert config.variants[-1].name == "portable"
    weights = {(tmp_path / "out" / v.files[1].path).read_bytes() for v in config.variants}
    assert weights == {b"one", b"two", b"three", b"p"}
    assert len(read_manifest(tmp_path / "out").parts) == 3


def test_a_version_never_changes(catalogue: Catalogue, model: str, tmp_path: Path) -> None:
    first = publish_build(catalogue, tmp_path / "a", Build((Made("cpu", HERE),), name=model), "one")
    before = pull_all(catalogue, tmp_path / "before", model, "one")
    cuda = Build((Made("cuda", on_gpu(9, 0)),), name=model, created_at=LATER)
    publish_build(catalogue, tmp_path / "b", cuda)
    after = pull_all(catalogue, tmp_path / "after", model, "one")
    assert before.version == after.version == first.version.digest
    assert read_tree(tmp_path / "before") == read_tree(tmp_path / "after")


def test_a_label_never_comes_to_mean_other_bytes(catalogue: Catalogue, model: str, tmp_path: Path) -> None:
    first = publish_build(catalogue, tmp_path / "a", Build(name=model), "1.4")
    other = Build((Made("portable", weights=b"other"),), name=model, spec=b"other")
    with pytest.raises(ConflictError, match=r"label taken: net\d+@1.4"):
        publish_build(catalogue, tmp_path / "b", other, "1.4")
    assert catalogue.read_state(model).labels["1.4"] == first.version.digest


def test_versions_without_a_given_label_are_numbered_by_day(
    catalogue: Catalogue, model: str, tmp_path: Path
) -> None:
    labels = [
        publish_build(
            catalogue, tmp_path / str(i), Build(name=model, spec=bytes([i]), created_at=LATER)
        ).version.labels
        for i in range(2)
    ]
    today = datetime.now(UTC).date().isoformat()
    assert labels == [(f"{today}.1",), (f"{today}.2",)]


def test_publishers_at_the_same_time_lose_nothing(
    registry: str, catalogue: Catalogue, kind: str, model: str, tmp_path: Path
) -> None:
    nodes = 3 if kind == "mlflow" else 5
    builds = [
        Build(
            (Made("cuda", on_gpu(8, i), bytes([i]) * 100),),
            name=model,
            created_at=f"2026-11-2{i}T00:00:00+00:00",
        )
        for i in range(nodes)
    ]
    bundles = [write_bundle(tmp_path / f"b{i}", build) for i, build in enumerate(builds)]

    def run(i: int) -> Published:
        with open_catalogue(registry, cache=Cache(tmp_path / f"cache{i}")) as own:
            return publish(bundles[i], own)

    with ThreadPoolExecutor(nodes) as pool:
        list(pool.map(run, range(nodes)))
    state = catalogue.read_state(model)
    current = [version for version in state.versions.values() if not version.superseded_by]
    assert [len(version.record.parts) for version in current] == [nodes]
    assert all(version.labels for version in current)
    pull_all(catalogue, tmp_path / "out", model)
    check_bundle(tmp_path / "out")


def test_only_what_this_machine_can_use_is_pulled(catalogue: Catalogue, model: str, tmp_path: Path) -> None:
    made = (Made("cuda", on_gpu(9, 0), b"c"), Made("cpu", ELSEWHERE, b"e"), Made("portable", weights=b"p"))
    publish_build(catalogue, tmp_path / "a", Build(made, name=model))
    pulled = pull(Wanted(Reference(model, None)), catalogue, tmp_path / "out", hardware=BARE)
    assert pulled.variants == ("portable",)
    assert set(pulled.left_out) == {"cuda", "cpu"}
    check_bundle(tmp_path / "out")
    assert not (tmp_path / "out/cuda").exists()
    gpu = pull(Wanted(Reference(model, None)), catalogue, tmp_path / "gpu", hardware=machine_with_gpu((9, 0)))
    assert gpu.variants == ("cuda", "portable")
    publish_build(catalogue, tmp_path / "b", Build((Made("cpu", ELSEWHERE),), name=model, spec=b"2"), "e")
    with pytest.raises(RegistryError, match="no variant of"):
        pull(Wanted(Reference(model, "e")), catalogue, tmp_path / "no", hardware=BARE)
    assert not (tmp_path / "no").exists()


def test_aliases_move_with_history_and_roll_back(catalogue: Catalogue, model: str, tmp_path: Path) -> None:
    versions = [
        publish_build(
            catalogue, tmp_path / str(i), Build(name=model, spec=bytes([i])), f"v{i}"
        ).version.digest
        for i in range(3)
    ]
    for i in range(3):
        promote(Reference(model, f"v{i}"), "production", catalogue)
    assert rollback(model, "production", catalogue).version.digest == versions[1]
    assert rollback(model, "production", catalogue, reason="slow").version.digest == versions[0]
    with pytest.raises(NotPublishedError, match="nothing to roll back to"):
        rollback(model, "production", catalogue)
    alias = catalogue.read_state(model).aliases["production"]
    assert [move.record.action for move in alias.history] == ["promote"] * 3 + ["rollback"] * 2
    assert alias.history[-1].record.reason == "slow"
    pulled = pull_all(catalogue, tmp_path / "out", model, "production")
    assert pulled.version == versions[0]


def test_promoting_twice_is_recorded_once(catalogue: Catalogue, model: str, tmp_path: Path) -> None:
    publish_build(catalogue, tmp_path / "a", Build(name=model), "a")
    promote(Reference(model, "a"), "production", catalogue)
    promote(Reference(model, "a"), "production", catalogue)
    assert len(catalogue.read_state(model).aliases["production"].history) == 1


@pytest.mark.parametrize(
    ("made", "objection"),
    [
        (Made("portable", error=2.0), "verification failed"),
        (Made("portable", init_ms=12.0), r"getting ready takes 12 ms instead of 10 ms, 1.20×"),
        (Made("portable", steady_ms=6.0), "steady run takes 6 ms instead of 5 ms"),
        (Made("portable", init_ms=None), "not measured"),
        (Made("cuda", on_gpu(9, 0)), "nothing for target cpu"),
    ],
)
@pytest.mark.parametrize("kind", ["directory"])
def test_the_gate_refuses_what_is_worse(
    catalogue: Catalogue, model: str, tmp_path: Path, made: Made, objection: str
) -> None:
    publish_build(catalogue, tmp_path / "a", Build(name=model), "old")
    promote(Reference(model, "old"), "production", catalogue)
    publish_build(catalogue, tmp_path / "b", Build((made,), name=model, spec=b"new"), "new")
    with pytest.raises(PromotionRefusedError, match=objection):
        promote(Reference(model, "new"), "production", catalogue)
    with pytest.raises(RegistryError, match="no reason given"):
        promote(Reference(model, "new"), "production", catalogue, gate=Gate(force=True))
    moved = promote(Reference(model, "new"), "production", catalogue, gate=Gate(force=True), reason="must")
    assert moved.alias.history[-1].record.reason == "must"
    assert len(moved.forced) == 1


def test_what_an_alias_names_is_never_collected(catalogue: Catalogue, model: str, tmp_path: Path) -> None:
    builds = [
        Build((Made("portable", weights=bytes([i]) * 50),), name=model, spec=bytes([i])) for i in range(3)
    ]
    versions = [
        publish_build(catalogue, tmp_path / str(i), build, f"v{i}").version.digest
        for i, build in enumerate(builds)
    ]
    promote(Reference(model, "v1"), "production", catalogue)
    planned = collect(model, catalogue, policy=NOTHING)
    assert set(planned.versions) == {versions[0], versions[2]}
    assert set(catalogue.read_state(model).versions) == set(versions), "a dry run removes nothing"
    done = collect(model, catalogue, policy=NOTHING, dry_run=False)
    assert done.versions == planned.versions
    assert set(catalogue.read_state(model).versions) == {versions[1]}
    pull_all(catalogue, tmp_path / "out", model, "production")
    check_bundle(tmp_path / "out")
    with pytest.raises(NotPublishedError):
        pull_all(catalogue, tmp_path / "gone", model, "v0")
    again = publish_build(catalogue, tmp_path / "again", builds[0], "v0b")
    assert again.version.digest == versions[0]
    with pytest.raises(ConflictError):
        publish_build(catalogue, tmp_path / "other", Build(name=model, spec=b"x"), "v2")


def test_what_was_pulled_once_is_there_without_the_registry(
    catalogue: Catalogue, model: str, tmp_path: Path, own_cache: Path
) -> None:
    bundle = write_bundle(tmp_path / "bundle", name=model)
    publish(bundle, catalogue)
    first = pull_cached(Wanted(Reference(model, None)), catalogue, hardware=BARE)
    second = pull_cached(Wanted(Reference(model, None)), catalogue, hardware=BARE)
    assert first.path == second.path
    assert second.fetched_bytes == 0
    assert read_tree(first.path) == read_tree(bundle)


def test_a_signature_is_verified_when_it_is_required(
    catalogue: Catalogue, model: str, tmp_path: Path
) -> None:
    private, public = write_keys(tmp_path / "right")
    _, wrong = write_keys(tmp_path / "wrong")
    bundle = write_bundle(tmp_path / "bundle", name=model, made=(Made("cpu", ELSEWHERE), Made("portable")))
    publish(bundle, catalogue)
    right = Wanted(Reference(model, None), verifier=parse_verifier(str(public)))
    with pytest.raises(SignatureError, match="got none"):
        pull(right, catalogue, tmp_path / "unsigned", hardware=BARE)
    publish(bundle, catalogue, signer=parse_signer(str(private)))
    publish(bundle, catalogue, signer=parse_signer(str(private)))
    assert [len(found) for found in catalogue.read_state(model).signatures.values()] == [1]
    pull(right, catalogue, tmp_path / "signed", hardware=BARE)
    other = Wanted(Reference(model, None), verifier=parse_verifier(str(wrong)))
    with pytest.raises(SignatureError, match="does not match"):
        pull(other, catalogue, tmp_path / "wrong-key", hardware=BARE)
    assert not (tmp_path / "unsigned").exists()
    assert not (tmp_path / "wrong-key").exists()


def test_a_model_that_is_not_there_is_said_to_be_missing(catalogue: Catalogue, tmp_path: Path) -> None:
    with pytest.raises(NotPublishedError, match="no such model: nothing-here"):
        pull_all(catalogue, tmp_path / "out", "nothing-here")
    assert catalogue.read_state("nothing-here").versions == {}


def test_models_are_listed(catalogue: Catalogue, model: str, tmp_path: Path) -> None:
    publish_build(catalogue, tmp_path / "a", Build(name=model))
    assert model in catalogue.backend.list_models()


def test_what_goes_wrong_with_the_reader_is_not_blamed_on_the_registry(
    catalogue: Catalogue, model: str, tmp_path: Path
) -> None:
    published = publish_build(catalogue, tmp_path / "a", Build(name=model))
    part = catalogue.read_state(model).parts[published.part]

    def read() -> None:
        with catalogue.backend.open_file(model, part, part.files[0], 0) as blocks:
            next(blocks)
            raise OSError(28, "disk full")

    with pytest.raises(OSError, match="disk full"):
        read()


def test_a_file_is_read_from_any_offset(catalogue: Catalogue, model: str, tmp_path: Path) -> None:
    weights = os.urandom(300_000)
    published = publish_build(
        catalogue, tmp_path / "a", Build((Made("portable", weights=weights),), name=model)
    )
    part = catalogue.read_state(model).parts[published.part]
    entry = next(one for one in part.files if one.size_bytes == len(weights))
    for offset in (0, 1, 150_000, len(weights)):
        with catalogue.backend.open_file(model, part, entry, offset) as blocks:
            assert b"".join(bytes(block) for block in blocks) == weights[offset:]


@pytest.mark.parametrize("kind", ["directory", "oci"])
def test_an_older_bundle_that_is_published_is_what_its_label_names(
    catalogue: Catalogue, model: str, tmp_path: Path
) -> None:
    new = Build((Made("portable", weights=b"new"),), name=model, created_at=LATER)
    old = Build((Made("portable", weights=b"old"),), name=model)
    latest = publish_build(catalogue, tmp_path / "new", new, "new").version
    for _ in range(2):
        published = publish(write_bundle(tmp_path / "old", old), catalogue, note=Note("old"))
        assert published.version.superseded_by == latest.digest
    assert published.version.labels == ("old",)
    pull_all(catalogue, tmp_path / "out", model, "old")
    assert (tmp_path / "out/portable" / f"{model}_optimized.onnx.data").read_bytes() == b"old"
    assert pull_all(catalogue, tmp_path / "out", model).version == latest.digest


@pytest.mark.parametrize("kind", ["directory"])
def test_the_latest_versions_are_those_published_last_and_not_superseded(
    catalogue: Catalogue, model: str, tmp_path: Path
) -> None:
    versions = [
        publish_build(
            catalogue, tmp_path / str(i), Build(name=model, spec=bytes([i])), f"v{i}"
        ).version.digest
        for i in range(3)
    ]
    made = (Made("cuda", on_gpu(9, 0)),)
    merged = publish_build(
        catalogue, tmp_path / "m", Build(made, name=model, spec=b"\0", created_at=LATER), "v3"
    )
    state = catalogue.read_state(model)
    kept = collect(model, catalogue, policy=Policy(keep_latest=2, keep_days=0))
    assert set(state.versions) - set(kept.versions) == {versions[2], merged.version.digest}


@pytest.mark.parametrize("kind", ["directory"])
def test_the_same_bundle_gets_its_label_back_after_it_was_collected(
    catalogue: Catalogue, model: str, tmp_path: Path
) -> None:
    for _ in range(2):
        assert publish_build(catalogue, tmp_path / "a", Build(name=model), "1.0").version.labels == ("1.0",)
        collect(model, catalogue, policy=NOTHING, dry_run=False)


@pytest.mark.parametrize("kind", ["directory"])
def test_what_a_killed_first_publisher_left_is_collected(
    registry: str, catalogue: Catalogue, model: str, tmp_path: Path
) -> None:
    publish_build(catalogue, tmp_path / "a", Build(name=model))
    for record in Path(registry, model, "records").iterdir():
        record.unlink()
    partial = Path(registry, model, "files/ab/.tmp-x~partial")
    partial.parent.mkdir(exist_ok=True)
    partial.write_bytes(b"x")
    os.utime(partial, (1, 1))
    assert catalogue.backend.list_models() == (model,)
    collect(model, catalogue, policy=NOTHING, dry_run=False)
    assert not [path for path in Path(registry, model, "files").rglob("*") if path.is_file()]
