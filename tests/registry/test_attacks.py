"""What a registry in bad hands can send, and what is refused."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.bundle.digest import digest_bytes
from pipeline.bundle.loader_config import FileEntry
from pipeline.errors import (
    BundleError,
    IntegrityError,
    NotPublishedError,
    PipelineError,
    RegistryError,
    SignatureError,
)
from pipeline.registry.cache import Cache
from pipeline.registry.catalogue import Catalogue, open_catalogue
from pipeline.registry.choosing import ALL, Wanted
from pipeline.registry.composition import list_candidates
from pipeline.registry.parts import read_bundle_part
from pipeline.registry.promotion import promote
from pipeline.registry.publishing import Note, publish
from pipeline.registry.pulling import pull
from pipeline.registry.receipt import verify_bundle
from pipeline.registry.records import (
    MAX_RECORD_BYTES,
    AliasRecord,
    PartRecord,
    RecordName,
    SignatureRecord,
    VersionRecord,
    encode_record,
    record_digest,
)
from pipeline.registry.references import Reference, open_registry, parse_reference, split_location
from pipeline.registry.signatures import parse_signer, parse_verifier
from pipeline.runtime.loading.sources import locate
from tests.registry.bundles import BARE, ELSEWHERE, HERE, Build, Made, read_tree, write_bundle
from tests.registry.keys import write_certificate, write_keys

DIGEST = digest_bytes(b"")


@pytest.fixture
def kind() -> str:
    return "directory"


def pull_it(catalogue: Catalogue, out: Path, verifier: str | None = None) -> None:
    method = None if verifier is None else parse_verifier(verifier)
    pull(Wanted(Reference("net", None), ALL, method), catalogue, out, hardware=BARE)


def files_of(registry: str) -> dict[str, Path]:
    """Files of the registry by name."""
    return {path.name: path for path in Path(registry, "net/files").rglob("*") if path.is_file()}


def test_one_changed_byte_in_any_file_is_always_noticed(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    for number, path in enumerate(files_of(registry).values()):
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with (
            open_catalogue(registry, cache=Cache(tmp_path / f"cache{number}")) as fresh,
            pytest.raises(IntegrityError, match="other bytes than recorded"),
        ):
            pull_it(fresh, tmp_path / f"out{number}")
        assert not (tmp_path / f"out{number}").exists()
        path.write_bytes(data)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_a_file_of_another_size_is_refused(
    registry: str, catalogue: Catalogue, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    path = files_of(registry)[digest_bytes(b"weights").removeprefix("sha256:")]
    path.write_bytes(change(path.read_bytes()))
    with open_catalogue(registry) as fresh, pytest.raises(IntegrityError):
        pull_it(fresh, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "path",
    ["../evil", "/etc/passwd", "a/../../evil", "a\\b", "", ".", "a//b", "a/./b", "a\0b", "x" * 2000],
)
def test_a_path_that_leaves_the_bundle_is_refused(
    catalogue: Catalogue, tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    part = read_bundle_part(write_bundle(tmp_path / "bundle")).record
    evil = dataclasses.replace(part, files=(*part.files, FileEntry(path, 0, DIGEST)))
    publish_record(catalogue, evil)
    with pytest.raises(NotPublishedError):
        pull_it(catalogue, tmp_path / "out")
    assert "path leaves its bundle" in caplog.text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("digest", ["md5:" + "0" * 32, "sha512:" + "0" * 128, "sha256:" + "0" * 63, "0" * 64])
def test_a_digest_of_another_algorithm_is_refused(
    catalogue: Catalogue, tmp_path: Path, digest: str, caplog: pytest.LogCaptureFixture
) -> None:
    part = read_bundle_part(write_bundle(tmp_path / "bundle")).record
    publish_record(catalogue, dataclasses.replace(part, files=(*part.files, FileEntry("a", 0, digest))))
    with pytest.raises(NotPublishedError):
        pull_it(catalogue, tmp_path / "out")
    assert "bad digest" in caplog.text


def test_a_part_that_hides_a_file_or_lists_another_is_refused(catalogue: Catalogue, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    publish(bundle, catalogue)
    part = read_bundle_part(bundle).record
    for files in (part.files[:-1], (*part.files, FileEntry("added", 0, DIGEST))):
        changed = dataclasses.replace(part, files=files, created_at=part.created_at)
        version = publish_record(catalogue, changed)
        with pytest.raises((IntegrityError, BundleError), match=r"contradicts its record|a part without"):
            pull(Wanted(Reference("net", version), ALL), catalogue, tmp_path / "out", hardware=BARE)


@pytest.mark.parametrize(
    "change",
    [{"source": DIGEST}, {"spec": DIGEST}, {"created_at": "2030"}, {"variants": ()}],
)
def test_a_part_that_says_other_things_than_its_manifest_is_refused(
    catalogue: Catalogue, tmp_path: Path, change: dict[str, object]
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    publish(bundle, catalogue)
    changed = dataclasses.replace(read_bundle_part(bundle).record, **change)  # type: ignore[arg-type]
    version = publish_record(catalogue, changed)
    with pytest.raises(IntegrityError, match="contradicts its record"):
        pull(Wanted(Reference("net", version), ALL), catalogue, tmp_path / "out", hardware=BARE)


def publish_record(catalogue: Catalogue, part: PartRecord) -> str:
    """Writes a part and a version of it, as someone with a tool of his own would; returns the version."""
    model = part.model
    name, data = encode_record(part)
    catalogue.backend.write_record(model, name, data)
    version = VersionRecord(model, part.source, part.spec, (name.digest,))
    catalogue.write_record(model, version)
    return record_digest(version)


def test_a_record_of_a_gigabyte_is_not_read(registry: str, catalogue: Catalogue, tmp_path: Path) -> None:
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    name = RecordName("label", digest_bytes(b"large"))
    path = Path(registry, "net/records", f"{name}.json")
    with path.open("wb") as file:
        file.truncate(2**30)
    assert len(catalogue.backend.read_record("net", name)) == MAX_RECORD_BYTES + 1
    with pytest.raises(IntegrityError, match="record too large"):
        catalogue.read_state("net")


def test_a_link_in_the_place_of_a_file_is_not_followed_out(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret!")
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    path = files_of(registry)[digest_bytes(b"weights").removeprefix("sha256:")]
    path.unlink()
    path.symlink_to(secret)
    with open_catalogue(registry) as fresh, pytest.raises(IntegrityError, match="other bytes"):
        pull_it(fresh, tmp_path / "out")


def test_a_bundle_with_files_of_somebodys_own_or_a_link_is_not_replaced(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    own = write_bundle(tmp_path / "own")
    (own / "notes.txt").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "bundle")
    for out, what in ((own, r"notes\.txt"), (tmp_path / "link", "a link")):
        with pytest.raises(RegistryError, match=what):
            pull_it(catalogue, out)
    assert (own / "notes.txt").read_text() == "precious"
    assert (tmp_path / "link").is_symlink()


def test_what_is_no_bundle_is_never_replaced(catalogue: Catalogue, tmp_path: Path) -> None:
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    with pytest.raises(RegistryError, match="would replace what is no bundle"):
        pull_it(catalogue, tmp_path / "mine")
    assert (tmp_path / "mine/thesis.tex").read_text() == "years of work"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    private, public = write_keys(tmp_path / "keys")
    return str(private), str(public)


@pytest.fixture
def signed(catalogue: Catalogue, tmp_path: Path, keys: tuple[str, str]) -> Path:
    """A bundle of two variants, published, signed and pulled; of the two, one."""
    bundle = write_bundle(
        tmp_path / "bundle", made=(Made("cpu", ELSEWHERE, b"c"), Made("portable", weights=b"p"))
    )
    publish(bundle, catalogue, signer=parse_signer(keys[0]))
    out = tmp_path / "pulled"
    pull(Wanted(Reference("net", None)), catalogue, out, hardware=BARE)
    return out


def test_a_pulled_bundle_can_be_verified_again_without_the_registry(
    signed: Path, keys: tuple[str, str]
) -> None:
    assert verify_bundle(signed, parse_verifier(keys[1])).variants == ("portable",)
    assert locate(signed, require_signature=keys[1]) == signed


def test_f21_one_changed_byte_of_a_signed_bundle_or_its_receipt_is_always_reported(
    signed: Path, keys: tuple[str, str]
) -> None:
    paths = [path for path in sorted(signed.rglob("*")) if path.is_file()]
    assert len(paths) > 8
    for path in paths:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        if path.name == "pulled.json":
            continue  # where it is from is talk, not evidence
        with pytest.raises(PipelineError) as raised:
            verify_bundle(signed, parse_verifier(keys[1]))
        assert raised.value.exit_code == 3
        path.write_bytes(data)


def test_a_file_that_was_added_or_removed_is_reported(signed: Path, keys: tuple[str, str]) -> None:
    (signed / "added.bin").write_bytes(b"x")
    with pytest.raises(IntegrityError, match=r"added\.bin: added"):
        verify_bundle(signed, parse_verifier(keys[1]))
    (signed / "added.bin").unlink()
    (signed / "golden.npz").unlink()
    with pytest.raises(IntegrityError, match=r"golden\.npz: missing"):
        verify_bundle(signed, parse_verifier(keys[1]))


def test_a_bundle_that_someone_else_wrote_anew_is_refused(
    signed: Path, keys: tuple[str, str], tmp_path: Path
) -> None:
    other = write_bundle(tmp_path / "other", made=(Made("portable", weights=b"evil"),))
    for name, data in read_tree(other).items():
        (signed / name).unlink(missing_ok=True)
        (signed / name).write_bytes(data)
    with pytest.raises(IntegrityError, match=r"portable/net_optimized\.onnx\.data: size"):
        verify_bundle(signed, parse_verifier(keys[1]))


def test_a_bundle_without_a_receipt_does_not_count_as_signed(tmp_path: Path, keys: tuple[str, str]) -> None:
    with pytest.raises(BundleError, match="not from a registry"):
        locate(write_bundle(tmp_path / "own"), require_signature=keys[1])


def downgrade(bundle: dict[str, object], change: Callable[[dict[str, object]], None]) -> dict[str, object]:
    """The same signature bundle with another statement inside."""
    copy = json.loads(json.dumps(bundle))
    statement = json.loads(base64.b64decode(copy["dsseEnvelope"]["payload"]))
    change(statement)
    copy["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    return dict(copy)


def to_old_predicate(statement: dict[str, object]) -> None:
    statement["predicateType"] = "https://model_signing/Digests/v0.1"


def to_weak_hash(statement: dict[str, object]) -> None:
    statement["predicate"]["serialization"]["hash_type"] = "md5"  # type: ignore[index]


def to_fewer_files(statement: dict[str, object]) -> None:
    statement["predicate"]["resources"].pop()  # type: ignore[index]


@pytest.mark.parametrize("change", [to_old_predicate, to_weak_hash, to_fewer_files])
def test_a_signature_that_says_less_is_refused(
    catalogue: Catalogue,
    signed: Path,
    keys: tuple[str, str],
    tmp_path: Path,
    change: Callable[[dict[str, object]], None],
) -> None:
    ((digest, ((own, good),)),) = (
        (part, tuple(found.items())) for part, found in catalogue.read_state("net").signatures.items()
    )
    catalogue.delete_record("net", RecordName("signature", own))
    catalogue.write_record("net", SignatureRecord(digest, downgrade(dict(good.bundle), change)))
    with pytest.raises(SignatureError):
        pull_it(catalogue, tmp_path / "out", keys[1])
    assert not (tmp_path / "out").exists()


def test_a_signature_without_the_name_of_its_key_is_refused(
    catalogue: Catalogue,
    signed: Path,
    keys: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ((digest, ((own, good),)),) = (
        (part, tuple(found.items())) for part, found in catalogue.read_state("net").signatures.items()
    )
    bundle = json.loads(json.dumps(good.bundle))
    del bundle["verificationMaterial"]["publicKey"]["hint"]
    catalogue.delete_record("net", RecordName("signature", own))
    catalogue.write_record("net", SignatureRecord(digest, bundle))
    with pytest.raises(SignatureError, match=r"got another|which key it is by"):
        pull_it(catalogue, tmp_path / "out", keys[1])
    assert capsys.readouterr().out == ""


def test_the_signature_of_another_part_does_not_count(
    catalogue: Catalogue, signed: Path, keys: tuple[str, str], tmp_path: Path
) -> None:
    ((good,),) = (tuple(found.values()) for found in catalogue.read_state("net").signatures.values())
    evil = write_bundle(tmp_path / "evil", Build((Made("portable", weights=b"evil"),), spec=b"x"))
    published = publish(evil, catalogue)
    catalogue.write_record("net", SignatureRecord(published.part, good.bundle))
    with pytest.raises(SignatureError, match=r"portable/net_optimized\.onnx\.data: content: signed"):
        pull_it(catalogue, tmp_path / "out", keys[1])


@pytest.mark.parametrize("text", ["", "../up", "a@", "a@b@c", "a/b", "a@" + "x" * 300, "-x", "a@../b"])
def test_a_reference_is_a_name_or_refused(text: str) -> None:
    with pytest.raises(RegistryError, match="no reference"):
        parse_reference(text)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host/x",
        "oci://user:secret@host/x",
        "mlflow+http://token@host",
        "s3://k:secret@b/x",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(RegistryError) as raised:
        open_registry(url)
    assert "secret" not in str(raised.value)
    assert "token@" not in str(raised.value)


def test_locations_name_a_registry_and_a_reference() -> None:
    environment = {"ORTPREP_REGISTRY": "s3://bucket/models"}
    assert split_location("registry://net@production", environment) == (
        "s3://bucket/models",
        Reference("net", "production"),
    )
    assert split_location("oci://host:5000/team/net@1.4", {}) == (
        "oci://host:5000/team",
        Reference("net", "1.4"),
    )
    digest = "sha256:" + "0" * 64
    assert split_location(f"file:///srv/net@{digest}", {}) == ("file:///srv", Reference("net", digest))
    with pytest.raises(RegistryError, match="no registry named"):
        split_location("registry://net", {})


@pytest.mark.parametrize(
    "path", [".registry/pulled.json", ".registry", "golden.npz/below", "portable/net_optimized.onnx/x"]
)
def test_a_part_cannot_put_a_file_where_a_puller_writes(
    catalogue: Catalogue, tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    part = read_bundle_part(write_bundle(tmp_path / "bundle")).record
    publish_record(catalogue, dataclasses.replace(part, files=(*part.files, FileEntry(path, 0, DIGEST))))
    with pytest.raises(NotPublishedError):
        pull_it(catalogue, tmp_path / "out")
    assert "in the way of another" in caplog.text


def test_records_that_are_none_do_not_hide_the_others(
    catalogue: Catalogue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(write_bundle(tmp_path / "bundle"), catalogue, note=Note("good"))
    digest = "sha256:" + "0" * 64
    nested = (
        b'{"schema_version":"1.0","part":"'
        + digest.encode()
        + b'","bundle":{"a":'
        + b"[" * 900
        + b"]" * 900
        + b"}}"
    )
    lone = b'{"schema_version":"1.0","label":"x","version":"' + digest.encode() + b'","at":"\\ud800"}'
    for kind, data in (
        ("part", b"junk"),
        ("version", b'{"schema_version":"9.0"}'),
        ("signature", nested),
        ("label", lone),
    ):
        catalogue.backend.write_record("net", RecordName(kind, digest_bytes(data)), data)
    pull_it(catalogue, tmp_path / "out")
    assert caplog.text.count("a record is left out") >= 3


@pytest.mark.parametrize("bundle", [{"verificationMaterial": []}, {}, {"dsseEnvelope": {"payload": "W1tb"}}])
def test_a_signature_that_is_none_does_not_stand_in_the_way_of_one(
    catalogue: Catalogue, signed: Path, keys: tuple[str, str], tmp_path: Path, bundle: dict[str, object]
) -> None:
    ((part, _),) = catalogue.read_state("net").signatures.items()
    catalogue.write_record("net", SignatureRecord(part, bundle))
    pull_it(catalogue, tmp_path / "out", keys[1])
    assert publish(tmp_path / "bundle", catalogue, signer=parse_signer(keys[0])).is_new is False
    assert len(catalogue.read_state("net").signatures[part]) == 2


def test_a_forged_signature_with_the_name_of_the_key_does_not_keep_the_real_one_out(
    catalogue: Catalogue, signed: Path, keys: tuple[str, str], tmp_path: Path
) -> None:
    ((part, found),) = catalogue.read_state("net").signatures.items()
    ((own, good),) = found.items()
    catalogue.delete_record("net", RecordName("signature", own))
    forged = json.loads(json.dumps(good.bundle))
    forged["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(b"0" * 64).decode()
    catalogue.write_record("net", SignatureRecord(part, forged))
    with pytest.raises(SignatureError):
        pull_it(catalogue, tmp_path / "before", keys[1])
    publish(tmp_path / "bundle", catalogue, signer=parse_signer(keys[0]), verifier=parse_verifier(keys[1]))
    pull_it(catalogue, tmp_path / "after", keys[1])


def test_a_version_pinned_by_its_digest_cannot_be_taken_over_by_a_label(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    first = publish(write_bundle(tmp_path / "a"), catalogue, note=Note("v1")).version.digest
    other = write_bundle(tmp_path / "b", spec=b"other")
    for name in (first.removeprefix("sha256:"), "0" * 64):
        with pytest.raises(RegistryError, match="no label"):
            publish(other, catalogue, note=Note(name))
        with pytest.raises(RegistryError, match="no name of an alias"):
            promote(Reference("net", "v1"), name, catalogue)


def test_what_a_part_says_of_its_variants_hides_none_of_the_others(tmp_path: Path) -> None:
    cpu = read_bundle_part(write_bundle(tmp_path / "cpu", made=(Made("cpu", HERE, b"c"),)))
    other = read_bundle_part(
        write_bundle(tmp_path / "other", made=(Made("portable"),), created_at="2030-01-01T00:00:00+00:00")
    )
    lie = dataclasses.replace(other.record, variants=cpu.record.variants)
    names = [candidate.name for candidate in list_candidates([cpu, dataclasses.replace(other, record=lie)])]
    assert names == ["cpu", "portable"]


def test_a_manifest_of_a_gigabyte_is_not_fetched(catalogue: Catalogue, tmp_path: Path) -> None:
    part = read_bundle_part(write_bundle(tmp_path / "bundle")).record
    large = tuple(
        dataclasses.replace(entry, size_bytes=2**30) if entry.path == "manifest.json" else entry
        for entry in part.files
    )
    publish_record(catalogue, dataclasses.replace(part, files=large))
    with pytest.raises(IntegrityError, match=r"file too large: manifest\.json"):
        pull_it(catalogue, tmp_path / "out")


def test_an_alias_record_that_leads_nowhere_hides_nothing(catalogue: Catalogue, tmp_path: Path) -> None:
    first = publish(write_bundle(tmp_path / "a"), catalogue, note=Note("v1")).version
    promote(Reference("net", "v1"), "production", catalogue)
    catalogue.write_record("net", AliasRecord("production", "promote", DIGEST, 1000, "t"))
    assert catalogue.read_state("net").aliases["production"].version == first.digest
    publish(write_bundle(tmp_path / "b", spec=b"other"), catalogue, note=Note("v2"))
    moved = promote(Reference("net", "v2"), "production", catalogue)
    assert moved.alias.history[-1].record.sequence == 1001
    with pytest.raises(NotPublishedError):
        pull(Wanted(Reference("net", "nothing")), catalogue, tmp_path / "out", hardware=BARE)


def test_a_pipe_in_the_place_of_a_record_is_not_waited_for(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    os.mkfifo(Path(registry, "net/records", f"{RecordName('label', DIGEST)}.json"))
    with pytest.raises(RegistryError, match="not a regular file"):
        catalogue.read_state("net")


def test_certificates_of_two_authorities_stand_beside_each_other(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    files = [write_certificate(tmp_path / name, name) for name in ("one", "two", "three")]
    for number, (key, certificate, authority) in enumerate(files[:2]):
        options = f"private_key={key},signing_certificate={certificate},certificate_chain={authority}"
        publish(bundle, catalogue, signer=parse_signer(f"certificate:{options}"))
        for other, (_, _, chain) in enumerate(files):
            verifier = f"certificate:certificate_chain={chain}"
            if other <= number:
                pull_it(catalogue, tmp_path / f"out{number}{other}", verifier)
            else:
                with pytest.raises(SignatureError):
                    pull_it(catalogue, tmp_path / f"no{number}{other}", verifier)


def test_a_signature_is_what_the_tool_of_model_signing_verifies(
    catalogue: Catalogue, tmp_path: Path, keys: tuple[str, str]
) -> None:
    bundle = write_bundle(tmp_path / "bundle", made=(Made("cpu", HERE), Made("portable")))
    publish(bundle, catalogue, signer=parse_signer(keys[0]))
    ((found,),) = (tuple(one.values()) for one in catalogue.read_state("net").signatures.values())
    signature = tmp_path / "model.sig"
    signature.write_text(json.dumps(found.bundle))
    tool = [sys.executable, "-m", "model_signing", "verify", "key", str(bundle)]
    command = [*tool, "--signature", str(signature), "--public_key", keys[1]]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    (bundle / "golden.npz").write_bytes(b"changed")
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0


@pytest.mark.parametrize("text", ["key", "sigstore", "sigstore:identity=a"])
def test_a_verifier_that_lacks_an_option_is_told_which(text: str) -> None:
    with pytest.raises(RegistryError, match="need more"):
        parse_verifier(text)


@pytest.mark.parametrize(
    "text",
    [
        "key:private_key=k,password=hunter2",
        "sigstore:identity_token=hunter2",
        "pkcs11:pkcs11_uri=pkcs11:x?pin-value=hunter2",
    ],
)
def test_secrets_are_no_options_of_a_signer(text: str) -> None:
    with pytest.raises(RegistryError, match="secrets are no options") as raised:
        parse_signer(text)
    assert "hunter2" not in str(raised.value)
