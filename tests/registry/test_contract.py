"""What every kind of registry promises, and what the catalogue makes of that in a folder."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from ortprep.bundle.verification import check_bundle
from ortprep.errors import (
    BundleError,
    ConflictError,
    IntegrityError,
    NotPublishedError,
    RegistryError,
    SignatureError,
)
from ortprep.registry.backend import Kind
from ortprep.registry.catalogue import Catalogue, open_catalogue
from ortprep.registry.garbage_collection import RetentionPolicy, collect
from ortprep.registry.promotion import PromotionGate, promote, rollback
from ortprep.registry.publish import find_missing, publish
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef
from tests.registry.builders import (
    ANY,
    BARE,
    HERE,
    Build,
    Made,
    Watched,
    machine_with_gpu,
    make_part,
    missing,
    name_of,
    on_gpu,
    put_part,
    read_file,
    read_part,
    read_tree,
    write_bundle,
    write_files,
    write_keys,
)
from tests.registry.conftest import SLOW_KINDS

LATER, LATEST = "2026-11-21T00:00:00+00:00", "2026-11-22T00:00:00+00:00"
NOTHING = RetentionPolicy(keep_latest=0, keep_days=0, grace_hours=0)

in_a_folder = pytest.mark.parametrize("kind", ["directory"])
"""For laws that no kind of registry has a part in: the other tests bind each kind to what they rely on."""


def pull_it(catalogue, out, model, version=None, hardware=BARE):
    return pull(PullRequest(VersionRef(model, version)), catalogue, out, hardware=hardware)


def publish_build(catalogue, folder, build, label=None):
    return publish(write_bundle(folder, build), catalogue, label=label)


def part_of(catalogue, published):
    return catalogue.read_part(published.version.model, published.part)


# On every kind of registry


def test_a_model_is_published_pulled_promoted_collected_and_published_again(catalogue, model, tmp_path):
    private, public = write_keys(tmp_path / "keys")
    bundles = [
        write_bundle(tmp_path / str(i), Build((Made("cpu", HERE, bytes([i]) * 50),), model, spec=bytes([i])))
        for i in range(3)
    ]
    versions = [publish(bundle, catalogue, label=f"v{i}").version for i, bundle in enumerate(bundles)]
    assert model in catalogue.list_models()
    before = catalogue.read_state(model)
    again = publish(bundles[0], catalogue)
    assert (again.version, again.uploaded_bytes, again.is_new) == (versions[0], 0, False)
    assert catalogue.read_state(model) == before

    publish(bundles[1], catalogue, private_key=private)
    promote(VersionRef(model, "v0"), "production", catalogue)
    catalogue.backend.put_ref(model, Kind.ALIAS, "production", versions[1].data)  # another tool moves it
    assert pull_it(catalogue, tmp_path / "out", model, "production").version == versions[1].digest
    promote(VersionRef(model, "v2"), "production", catalogue)
    planned = collect(model, catalogue, policy=NOTHING)
    assert planned.versions == (versions[0],), "the alias names v2, and would be rolled back to v1"
    assert rollback(model, "production", catalogue).version == versions[1]
    with pytest.raises(SignatureError, match="got none"):
        pull(
            PullRequest(VersionRef(model, "v0"), public_key=public),
            catalogue,
            tmp_path / "out",
            hardware=BARE,
        )
    signed = PullRequest(VersionRef(model, "production"), public_key=public)
    pull(signed, catalogue, tmp_path / "out", hardware=BARE)
    assert read_tree(tmp_path / "out") == read_tree(bundles[1])

    planned = collect(model, catalogue, policy=NOTHING)
    assert planned.versions == (versions[0], versions[2])
    assert len(catalogue.read_state(model).versions) == 3, "a dry run removes nothing"
    assert collect(model, catalogue, policy=NOTHING, dry_run=False).versions == planned.versions
    assert list(catalogue.read_state(model).versions.values()) == [versions[1]]
    pull_it(catalogue, tmp_path / "out", model, "production")
    check_bundle(tmp_path / "out")
    with pytest.raises(NotPublishedError):
        pull_it(catalogue, tmp_path / "gone", model, "v2")
    again = publish(bundles[2], catalogue, label="v2")
    assert (again.is_new, again.version.label) == (True, "v2")
    assert pull_it(catalogue, tmp_path / "gone", model, "v2").version == again.version.digest


@pytest.mark.parametrize("kind", ["directory", "oci"])  # MLflow keeps the files of each version apart
def test_versions_that_share_weights_upload_them_once(catalogue, kind, model, tmp_path):
    weights = os.urandom(400_000)
    publish_build(catalogue, tmp_path / "a", Build((Made("portable", weights=weights),), name=model))
    other = Build(
        (Made("portable", weights=weights),), name=model, graph=b"other", created_at=LATER, spec=b"other"
    )
    second = publish_build(catalogue, tmp_path / "b", other)
    assert second.uploaded_bytes < 20_000


@in_a_folder
def test_parts_of_one_source_and_spec_become_one_version(catalogue, model, tmp_path):
    builds = (
        Build((Made("cpu", HERE, b"one"),), name=model),
        Build((Made("cuda", on_gpu(9, 0), b"two"),), name=model, created_at=LATER),
        Build((Made("cuda", on_gpu(8, 6), b"three"),), name=model, created_at=LATEST),
    )
    published = [publish_build(catalogue, tmp_path / str(i), build) for i, build in enumerate(builds)]
    last = published[-1].version
    assert last.part_digests == {one.part for one in published}
    state = catalogue.read_state(model)
    assert state.superseded_by[published[0].version.digest] == last.digest
    for index, hardware in enumerate((BARE, machine_with_gpu((9, 0)), machine_with_gpu((8, 6)))):
        pulled = pull_it(catalogue, tmp_path / f"out{index}", model, hardware=hardware)
        assert pulled.part == published[index].part
        assert read_tree(tmp_path / f"out{index}") == read_tree(tmp_path / str(index))
    other = PullRequest(VersionRef(model, None), published[1].part)
    assert pull(other, catalogue, tmp_path / "named", hardware=BARE).variants == ("cuda", "portable")


@in_a_folder
def test_other_weights_beside_the_same_graph_are_another_source(catalogue, model, tmp_path):
    old = Build((Made("cuda", on_gpu(9, 0), b"old"),), model)
    publish_build(catalogue, tmp_path / "old", old, "1.0")
    trained_again = Build((Made("cpu", HERE, b"new"),), model, source_data=b"other weights", created_at=LATER)
    new = publish_build(catalogue, tmp_path / "new", trained_again, "2.0")
    assert new.version.part_digests == {new.part}
    pulled = pull_it(catalogue, tmp_path / "out", model, "2.0", hardware=machine_with_gpu((9, 0)))
    assert pulled.part == new.part, "no GPU gets the weights of 1.0"


@pytest.mark.attack
@in_a_folder
@pytest.mark.parametrize(
    ("old", "new"),
    [(("cpu-int8", "cpu"), ("cpu",)), (("cpu",), ("portable",)), (("cpu",), ("cpu",))],
    ids=["refused", "slower than portable", "same"],
)
@pytest.mark.parametrize("cores", [2, 8])
def test_a_rebuild_takes_the_place_of_the_machines_old_part_with_all_variants(
    catalogue, model, tmp_path, old, new, cores
):
    made = [
        [Made(name, ANY if name == "portable" else HERE, weights, steady_ms=ms) for name in names]
        for names, weights, ms in ((old, b"old", 5.0), (new, b"new", 50.0))
    ]
    publish_build(catalogue, tmp_path / "old", Build(made[0], model), "1.0")
    promote(VersionRef(model, "1.0"), "production", catalogue)
    rebuilt = Build(made[1], model, created_at=LATER, cores=cores)
    rebuilt_version = publish_build(catalogue, tmp_path / "new", rebuilt, "1.1")
    assert rebuilt_version.version.part_digests == {rebuilt_version.part}
    assert pull_it(catalogue, tmp_path / "out", model, "1.1").part == rebuilt_version.part
    with pytest.raises(RegistryError, match=r"no longer exists|50 ms|different hardware"):
        promote(VersionRef(model, "1.1"), "production", catalogue)


AVX2 = HERE._replace(cpu_features=("avx2",))


@in_a_folder
@pytest.mark.parametrize(
    "other",
    [
        Build((Made("cpu", AVX2),)),
        Build((Made("cuda", on_gpu(9, 0)), Made("cpu", HERE))),
        Build((Made("cpu", HERE),), onnxruntime="1.30.0"),
    ],
    ids=["instruction sets", "GPU", "ONNX Runtime"],
)
def test_a_part_of_other_hardware_or_another_onnxruntime_is_kept(catalogue, model, tmp_path, other):
    first = publish_build(catalogue, tmp_path / "a", Build((Made("cpu", HERE),), model))
    second = publish_build(
        catalogue, tmp_path / "b", dataclasses.replace(other, name=model, created_at=LATER)
    )
    assert second.version.part_digests == {first.part, second.part}


@pytest.mark.attack
@in_a_folder
def test_more_variants_do_not_make_an_older_part_better(catalogue, model, tmp_path):
    old = Build((Made("cpu-int8", HERE, b"old"), Made("cpu", HERE, b"old")), model)
    publish_build(catalogue, tmp_path / "old", old)
    new = publish_build(
        catalogue, tmp_path / "new", Build((Made("cpu", AVX2, b"new"),), model, created_at=LATER)
    )
    assert len(new.version.parts) == 2
    both_fit = BARE._replace(cpu_features=("avx2",))
    assert pull_it(catalogue, tmp_path / "out", model, hardware=both_fit).part == new.part


@in_a_folder
def test_a_bundle_without_a_portable_variant_is_not_published(catalogue, model, tmp_path):
    bundle = write_bundle(tmp_path / "a", name=model, made=(Made("cpu", HERE),), portable=False)
    with pytest.raises(BundleError, match="not a complete bundle"):
        publish(bundle, catalogue)


@in_a_folder
def test_a_version_never_changes(catalogue, model, tmp_path):
    first = publish_build(catalogue, tmp_path / "a", Build((Made("cpu", HERE),), name=model), "one")
    before = pull_it(catalogue, tmp_path / "before", model, "one")
    cuda = Build((Made("cuda", on_gpu(9, 0)),), name=model, created_at=LATER)
    publish_build(catalogue, tmp_path / "b", cuda)
    after = pull_it(catalogue, tmp_path / "after", model, "one")
    assert before.version == after.version == first.version.digest
    assert read_tree(tmp_path / "before") == read_tree(tmp_path / "after")


@in_a_folder
def test_a_label_never_comes_to_mean_other_bytes(catalogue, model, tmp_path):
    first = publish_build(catalogue, tmp_path / "a", Build(name=model), "1.4")
    other = Build((Made("portable", weights=b"other"),), name=model, spec=b"other")
    with pytest.raises(ConflictError, match=r"label taken: net\d+@1.4"):
        publish_build(catalogue, tmp_path / "b", other, "1.4")
    assert catalogue.read_state(model).labels["1.4"] == first.version.digest


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["oci"])
def test_a_publisher_that_withdraws_a_version_leaves_another_ones_label_its_tag(catalogue, model, tmp_path):
    published = []

    def publish_before(name, *args):
        if name == "put_ref" and Kind.VERSION in args and not published:
            published.append(publish_build(catalogue, tmp_path / "a", Build(name=model), "1.4").version)

    late = Catalogue(Watched(catalogue.backend, publish_before))
    with pytest.raises(ConflictError, match="label taken"):
        publish_build(late, tmp_path / "b", Build(name=model, spec=b"other"), "1.4")
    assert catalogue.backend.list_refs(model, Kind.ALIAS) == {"1.4": published[0].digest}


def test_of_those_that_take_one_label_for_other_bytes_at_once_at_most_one_gets_it(
    registry, catalogue, model, tmp_path
):
    bundles = [write_bundle(tmp_path / str(i), Build(name=model, spec=bytes([i]))) for i in range(2)]
    start = Barrier(2)

    def claim(bundle, label):
        with open_catalogue(registry) as own:
            start.wait(600)
            try:
                return publish(bundle, own, label=label).version.digest
            except ConflictError:
                return None

    for label in ("1.0", "1.1", "1.2"):
        with ThreadPoolExecutor(2) as pool:
            got = {*pool.map(claim, bundles, [label] * 2)} - {None}
        held = catalogue.read_state(model).holders(label)
        assert {one.digest for one in held} == got
        assert len(held) <= 1
        for version in held:
            catalogue.backend.delete_version(model, name_of(version))


@in_a_folder
def test_a_label_names_the_latest_version_of_its_source_and_spec(catalogue, model, tmp_path):
    cpu = write_bundle(tmp_path / "cpu", name=model, made=(Made("cpu", HERE),))
    cuda = write_bundle(tmp_path / "cuda", name=model, made=(Made("cuda", on_gpu(9, 0)),))
    found = [publish(one, catalogue, label="1.4").version for one in (cpu, cuda, cuda)]
    assert [(version.label, len(version.parts)) for version in found] == [("1.4", 1), ("1.4", 2), ("1.4", 2)]
    assert pull_it(catalogue, tmp_path / "out", model, "1.4").version == found[1].digest


def test_publishers_at_the_same_time_lose_nothing(registry, catalogue, kind, model, tmp_path):
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

    def run(i):
        with open_catalogue(registry) as own:
            return publish(bundles[i], own)

    with ThreadPoolExecutor(nodes) as pool:
        list(pool.map(run, range(nodes)))
    state = catalogue.read_state(model)
    current = [one for digest, one in state.versions.items() if digest not in state.superseded_by]
    assert [len(version.parts) for version in current] == [nodes]
    pull_it(catalogue, tmp_path / "out", model)
    check_bundle(tmp_path / "out")


@in_a_folder
def test_an_alias_goes_back_once_to_what_it_named_before(catalogue, model, tmp_path):
    versions = [
        publish_build(
            catalogue, tmp_path / str(i), Build(name=model, spec=bytes([i])), f"v{i}"
        ).version.digest
        for i in range(3)
    ]
    nothing_left = pytest.raises(NotPublishedError, match="nothing to roll back to")
    for i in (0, 1, 2, 2):  # promoting twice changes nothing
        promote(VersionRef(model, f"v{i}"), "production", catalogue)
        if i == 0:
            with nothing_left:
                rollback(model, "production", catalogue)
    assert rollback(model, "production", catalogue).version.digest == versions[1]
    with nothing_left:
        rollback(model, "production", catalogue)
    assert pull_it(catalogue, tmp_path / "out", model, "production").version == versions[1]


@pytest.mark.parametrize(
    ("made", "objection"),
    [
        (Made("portable", error=2.0), "verification failed"),
        (Made("portable", init_ms=12.0), r"ready, warm cache: 12 ms instead of 10 ms, 1.200×"),
    ],
)
@in_a_folder
def test_the_gate_refuses_what_is_worse(catalogue, model, tmp_path, made, objection):
    publish_build(catalogue, tmp_path / "a", Build(name=model), "old")
    promote(VersionRef(model, "old"), "production", catalogue)
    publish_build(catalogue, tmp_path / "b", Build((made,), name=model, spec=b"new"), "new")
    with pytest.raises(RegistryError, match=objection):
        promote(VersionRef(model, "new"), "production", catalogue)
    assert promote(VersionRef(model, "new"), "production", catalogue, gate=PromotionGate(force=True)).forced


def test_a_model_that_is_not_there_is_said_to_be_missing(catalogue, tmp_path):
    with pytest.raises(NotPublishedError, match="no such model: nothing-here"):
        pull_it(catalogue, tmp_path / "out", "nothing-here")
    assert catalogue.read_state("nothing-here").versions == {}


def test_what_goes_wrong_with_the_reader_is_not_blamed_on_the_registry(catalogue, model, tmp_path):
    published = publish_build(catalogue, tmp_path / "a", Build(name=model))
    part = part_of(catalogue, published)

    def read():
        with catalogue.backend.open_file(part, part.files[0]) as opened:
            next(opened.blocks)
            raise OSError(28, "disk full")

    with pytest.raises(OSError, match="disk full"):
        read()


def test_a_file_is_read_from_any_offset(catalogue, model, tmp_path):
    weights = os.urandom(300_000)
    published = publish_build(
        catalogue, tmp_path / "a", Build((Made("portable", weights=weights),), name=model)
    )
    part = part_of(catalogue, published)
    entry = next(one for one in part.files if one.size_bytes == len(weights))
    for offset in (0, 1, 150_000):
        with catalogue.backend.open_file(part, entry, offset) as opened:
            assert b"".join(bytes(block) for block in opened.blocks) == weights[opened.start :]


BIG = os.urandom(600_000)


@pytest.mark.parametrize("data", [b"small", BIG])
def test_a_file_with_other_bytes_is_not_kept(catalogue, model, tmp_path, data):
    part = make_part(model, {"a": data})
    for wrong in (data[:-1], data + b"x", data[:-1] + bytes([data[-1] ^ 1]), b""):
        (tmp_path / "a").write_bytes(wrong)
        with pytest.raises(IntegrityError, match="other bytes than recorded: a"):
            catalogue.backend.put_file(part, part.files[0], tmp_path / "a")
        assert missing(catalogue.backend, part) == part.files
        assert missing(catalogue.backend, make_part(model, {"a": wrong}))


def test_files_of_any_name_and_size_come_back(catalogue, model, tmp_path):
    """Also empty ones, and of several names for the same bytes."""
    contents = {"loader.json": b'{"nan": "\\u0000"}\r\n', "cpu/model.onnx": BIG, "empty.bin": b""}
    contents |= {"cpu/ein ü & ein ?+;=.bin": b"odd", "copy.onnx": BIG}
    part, backend = make_part(model, contents), catalogue.backend
    assert len(missing(backend, part)) == 4
    sent = put_part(backend, part, write_files(tmp_path / "files", contents))
    assert sent == sum(map(len, set(contents.values())))
    assert missing(backend, part) == ()
    assert {path: read_file(backend, part, path) for path in contents} == contents
    assert read_part(backend, part.digest, model) == part.data


@pytest.mark.parametrize("kind", ["directory", "oci"])
def test_an_older_bundle_that_is_published_is_what_its_label_names(catalogue, model, tmp_path):
    new = Build((Made("portable", weights=b"new"),), name=model, created_at=LATER)
    old = Build((Made("portable", weights=b"old"),), name=model)
    latest = publish_build(catalogue, tmp_path / "new", new, "new").version
    for _ in range(2):
        published = publish(write_bundle(tmp_path / "old", old), catalogue, label="old")
        assert published.superseded_by == latest.digest
    assert published.version.label == "old"
    pull_it(catalogue, tmp_path / "out", model, "old")
    assert (tmp_path / "out/portable" / f"{model}_optimized.onnx.data").read_bytes() == b"old"
    assert pull_it(catalogue, tmp_path / "out", model).version == latest.digest


@in_a_folder
def test_the_latest_versions_are_those_published_last_and_not_superseded(catalogue, model, tmp_path):
    versions = [
        publish_build(catalogue, tmp_path / str(i), Build(name=model, spec=bytes([i])), f"v{i}").version
        for i in range(3)
    ]
    made = (Made("cuda", on_gpu(9, 0)),)
    merged = publish_build(
        catalogue, tmp_path / "m", Build(made, name=model, spec=b"\0", created_at=LATER), "v3"
    )
    state = catalogue.read_state(model)
    planned = collect(model, catalogue, policy=RetentionPolicy(keep_latest=2, keep_days=0))
    gone = {version.digest for version in planned.versions}
    assert set(state.versions) - gone == {versions[2].digest, merged.version.digest}


@pytest.mark.parametrize("kind", ["directory", *SLOW_KINDS])
def test_what_nobody_names_goes_after_the_grace_period_and_what_is_refreshed_stays(
    catalogue, model, tmp_path
):
    published = publish_build(catalogue, tmp_path / "a", Build(name=model), "1.0")
    part = part_of(catalogue, published)
    catalogue.backend.delete_version(model, name_of(published.version))
    patient = RetentionPolicy(0, 0, grace_hours=1)
    assert not collect(model, catalogue, policy=patient, dry_run=False).swept.parts
    assert find_missing(part, catalogue) == ()
    assert collect(model, catalogue, policy=NOTHING, dry_run=False).swept.parts == (part.digest,)
    assert len(find_missing(part, catalogue)) == len({one.sha256 for one in part.files})


@in_a_folder
def test_what_a_publisher_relies_on_is_young_again(registry, catalogue, model, tmp_path):
    published = publish_build(catalogue, tmp_path / "a", Build(name=model), "1.0")
    blobs = [path for path in Path(registry, model, "blobs").rglob("*") if path.is_file()]
    for path in blobs:
        os.utime(path, (1, 1))
    catalogue.backend.delete_version(model, name_of(published.version))
    assert find_missing(part_of(catalogue, published), catalogue) == ()
    swept = collect(model, catalogue, policy=RetentionPolicy(0, 0, grace_hours=1), dry_run=False).swept
    assert swept.files == 0
    assert all(path.exists() for path in blobs)


@in_a_folder
def test_what_a_killed_first_publisher_left_is_collected(registry, catalogue, model, tmp_path):
    publish_build(catalogue, tmp_path / "a", Build(name=model))
    for path in Path(registry, model, "versions").iterdir():
        path.unlink()
    partial = Path(registry, model, f"blobs/ab/.tmp-{'ab' * 32}~{'0' * 16}")
    partial.parent.mkdir(exist_ok=True)
    partial.write_bytes(b"x")
    os.utime(partial, (1, 1))
    assert catalogue.backend.list_models() == (model,)
    collect(model, catalogue, policy=NOTHING, dry_run=False)
    assert not [path for path in Path(registry, model, "blobs").rglob("*") if path.is_file()]
