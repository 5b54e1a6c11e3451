"""What a registry in bad hands can send, and what is refused."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortprep.bundle.codec import canonical_json
from ortprep.bundle.digest import digest_bytes
from ortprep.errors import (
    BundleError,
    CacheError,
    ConflictError,
    IntegrityError,
    NotPublishedError,
    PipelineError,
    RegistryError,
    SignatureError,
)
from ortprep.registry.alias_moves import Move, encode_move, parse_move
from ortprep.registry.backend import MOVE, SIGNATURE
from ortprep.registry.cache import Cache
from ortprep.registry.catalogue import Catalogue, open_catalogue
from ortprep.registry.documents import (
    MAX_DOCUMENT_BYTES,
    MAX_FILE_BYTES,
    Part,
    Version,
    build_version,
    parse_part,
    parse_version,
)
from ortprep.registry.part_bundle import read_part_bundle
from ortprep.registry.promotion import PromotionGate, promote, rollback
from ortprep.registry.publish import PublishResult, publish
from ortprep.registry.pull import MAX_BYTES_VARIABLE, TIMEOUT_VARIABLE, PullRequest, pull, pull_cached
from ortprep.registry.receipt import verify_bundle
from ortprep.registry.references import VersionRef, open_registry, parse_reference, split_location
from ortprep.registry.signature_methods import SignatureMethod, parse_signer, parse_verifier
from ortprep.runtime.loading.sources import locate
from tests.registry.builders import (
    BARE,
    ELSEWHERE,
    HERE,
    Build,
    Made,
    read_tree,
    write_bundle,
    write_certificate,
    write_keys,
)

DIGEST = digest_bytes(b"")


@pytest.fixture
def kind() -> str:
    return "directory"


def pull_it(catalogue: Catalogue, out: Path, verifier: str | None = None, version: str | None = None) -> str:
    method = None if verifier is None else parse_verifier(verifier)
    request = PullRequest(VersionRef("net", version), verifier=method)
    return pull(request, catalogue, out, hardware=BARE).version


def files_of(registry: str) -> dict[str, Path]:
    """Files of the registry by name."""
    return {path.name: path for path in Path(registry, "net/blobs").rglob("*") if path.is_file()}


def tampered(part: Part, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The document of a part as somebody with a tool of his own would write it."""
    document = json.loads(part.data)
    change(document)
    return canonical_json(document)


def put_document(catalogue: Catalogue, registry: str, part: Part, data: bytes) -> str:
    """Puts another document of a part in the registry, and a version of it; returns the version's digest."""
    folder = Path(registry, "net")
    digest = digest_bytes(data)
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    (folder / f"parts/{digest.removeprefix('sha256:')}.json").write_bytes(data)
    version = build_version("net", [part], label="evil", published_at="2030-01-01T00:00:00+00:00")
    document = json.loads(version.data)
    document["manifests"][0] |= {"digest": digest, "size": len(data)}
    (folder / "versions").mkdir(exist_ok=True)
    (folder / "versions/evil.json").write_bytes(canonical_json(document))
    return digest_bytes(canonical_json(document))


def add_layer(path: str, digest: str = DIGEST, size: object = 0) -> Callable[[dict[str, Any]], object]:
    layer = {"digest": digest, "size": size, "annotations": {"org.opencontainers.image.title": path}}
    return lambda document: document["layers"].append(layer)


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
    registry: str, catalogue: Catalogue, tmp_path: Path, path: str
) -> None:
    part = read_part_bundle(write_bundle(tmp_path / "bundle")).part
    put_document(catalogue, registry, part, tampered(part, add_layer(path)))
    with pytest.raises(BundleError):
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
def test_a_bad_digest_or_size_is_refused(
    registry: str, catalogue: Catalogue, tmp_path: Path, digest: str, size: object
) -> None:
    part = read_part_bundle(write_bundle(tmp_path / "bundle")).part
    put_document(catalogue, registry, part, tampered(part, add_layer("a", digest, size)))
    with pytest.raises(IntegrityError, match=r"bad digest|bad size"):
        pull_it(catalogue, tmp_path / "out")


def test_numbers_of_thousands_of_digits_are_refused(tmp_path: Path) -> None:
    part = read_part_bundle(write_bundle(tmp_path / "bundle")).part
    huge = part.data.replace(b'"schemaVersion":2', b'"schemaVersion":' + b"9" * 5000)
    with pytest.raises(BundleError):
        parse_part(huge)
    move = Move("production", DIGEST, 1, "promote", "t")
    for sequence in (0, -1, 2**31, 10**30):
        data = json.loads(encode_move(move)) | {"sequence": sequence}
        with pytest.raises(IntegrityError):
            parse_move(canonical_json(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["layers"].pop(),
        add_layer("added"),
        lambda document: document["annotations"].update({"dev.ortprep.source": DIGEST}),
        lambda document: document["annotations"].update({"dev.ortprep.spec": DIGEST}),
        lambda document: document["annotations"].update({"org.opencontainers.image.created": "2030"}),
        lambda document: document["annotations"].update({"dev.ortprep.variants": '{"variants":[]}'}),
    ],
)
def test_a_part_that_says_other_things_than_its_bundle_is_refused(
    registry: str, catalogue: Catalogue, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    publish(bundle, catalogue)
    part = read_part_bundle(bundle).part
    version = put_document(catalogue, registry, part, tampered(part, change))
    with pytest.raises(IntegrityError, match=r"contradicts its document|of another source or spec"):
        pull_it(catalogue, tmp_path / "out", version=version)


def test_a_document_of_a_gigabyte_is_not_read(registry: str, catalogue: Catalogue, tmp_path: Path) -> None:
    published = publish(write_bundle(tmp_path / "bundle"), catalogue)
    for path in (Path(registry, "net/versions/large.json"), Path(registry, "net/aliases/large")):
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(2**30)
    found = catalogue.backend.read_versions("net", lambda _: None)
    assert max(map(len, found)) == MAX_DOCUMENT_BYTES + 1
    state = catalogue.read_state("net")
    assert (list(state.versions), state.aliases) == ([published.version.digest], {})


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
    with pytest.raises(RegistryError, match="would replace something that is not a bundle"):
        pull_it(catalogue, tmp_path / "mine")
    assert (tmp_path / "mine/thesis.tex").read_text() == "years of work"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    private, public = write_keys(tmp_path / "keys")
    return str(private), str(public)


@pytest.fixture
def signed(catalogue: Catalogue, tmp_path: Path, keys: tuple[str, str]) -> Path:
    """A bundle of two variants, published, signed and pulled."""
    bundle = write_bundle(
        tmp_path / "bundle", made=(Made("cpu", ELSEWHERE, b"c"), Made("portable", weights=b"p"))
    )
    publish(bundle, catalogue, signer=parse_signer(keys[0]))
    out = tmp_path / "pulled"
    pull_it(catalogue, out)
    return out


def test_a_pulled_bundle_can_be_verified_again_without_the_registry(
    signed: Path, keys: tuple[str, str]
) -> None:
    for names in ("false", "true"):
        verifier = f"key:public_key={keys[1]},signed_names={names}"
        assert verify_bundle(signed, parse_verifier(verifier)).reference == "net"
        assert locate(signed, require_signature=verifier) == signed


def test_f21_one_changed_byte_of_a_signed_bundle_or_its_receipt_is_always_reported(
    signed: Path, keys: tuple[str, str]
) -> None:
    paths = [path for path in sorted(signed.rglob("*")) if path.is_file()]
    assert len(paths) > 8
    for path in paths:
        if path.name == "pulled.json":
            continue  # it proves nothing by itself
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
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


def downgrade(signature: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The same signature with another statement inside."""
    bundle = json.loads(signature)
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    change(statement)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    return canonical_json(bundle)


def to_old_predicate(statement: dict[str, Any]) -> None:
    statement["predicateType"] = "https://model_signing/Digests/v0.1"


def to_weak_hash(statement: dict[str, Any]) -> None:
    statement["predicate"]["serialization"]["hash_type"] = "md5"


def to_fewer_files(statement: dict[str, Any]) -> None:
    statement["predicate"]["resources"].pop()


def replace_signature(registry: str, catalogue: Catalogue, change: Callable[[bytes], bytes]) -> None:
    """Puts another signature in the place of the part's."""
    (version,) = catalogue.read_state("net").versions.values()
    part = catalogue.read_part("net", version.parts[0].digest)
    (good,) = catalogue.read_signatures(part)
    for path in Path(registry, "net/attached", part.digest.removeprefix("sha256:")).iterdir():
        path.unlink()
    catalogue.backend.attach("net", part, SIGNATURE, change(good))


@pytest.mark.parametrize("change", [to_old_predicate, to_weak_hash, to_fewer_files])
def test_a_signature_that_says_less_is_refused(
    registry: str,
    catalogue: Catalogue,
    signed: Path,
    keys: tuple[str, str],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
) -> None:
    replace_signature(registry, catalogue, lambda good: downgrade(good, change))
    with pytest.raises(SignatureError):
        pull_it(catalogue, tmp_path / "out", keys[1])
    assert not (tmp_path / "out").exists()


def test_a_signature_without_the_name_of_its_key_is_refused(
    registry: str,
    catalogue: Catalogue,
    signed: Path,
    keys: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def forget(good: bytes) -> bytes:
        bundle = json.loads(good)
        del bundle["verificationMaterial"]["publicKey"]["hint"]
        return canonical_json(bundle)

    replace_signature(registry, catalogue, forget)
    with pytest.raises(SignatureError, match=r"got another|the key that signed"):
        pull_it(catalogue, tmp_path / "out", keys[1])
    assert capsys.readouterr().out == ""


def test_the_signature_of_another_part_does_not_count(
    catalogue: Catalogue, signed: Path, keys: tuple[str, str], tmp_path: Path
) -> None:
    (version,) = catalogue.read_state("net").versions.values()
    (good,) = catalogue.read_signatures(catalogue.read_part("net", version.parts[0].digest))
    evil = write_bundle(tmp_path / "evil", Build((Made("portable", weights=b"evil"),), spec=b"x"))
    published = publish(evil, catalogue)
    catalogue.backend.attach("net", catalogue.read_part("net", published.part), SIGNATURE, good)
    with pytest.raises(SignatureError, match=r"portable/net_optimized\.onnx\.data: content: signed"):
        pull_it(catalogue, tmp_path / "out", keys[1])


@pytest.mark.parametrize("data", [b"junk", b"{}", b'{"verificationMaterial":[]}', b"[" * 5000, b"\xff"])
def test_a_signature_that_is_none_does_not_stand_in_the_way_of_one(
    catalogue: Catalogue, signed: Path, keys: tuple[str, str], tmp_path: Path, data: bytes
) -> None:
    (version,) = catalogue.read_state("net").versions.values()
    part = catalogue.read_part("net", version.parts[0].digest)
    catalogue.backend.attach("net", part, SIGNATURE, data)
    pull_it(catalogue, tmp_path / "out", keys[1])
    assert publish(tmp_path / "bundle", catalogue, signer=parse_signer(keys[0])).is_new is False
    assert len(catalogue.read_signatures(part)) == 2


def test_a_forged_signature_with_the_name_of_the_key_does_not_keep_the_real_one_out(
    registry: str, catalogue: Catalogue, signed: Path, keys: tuple[str, str], tmp_path: Path
) -> None:
    def forge(good: bytes) -> bytes:
        bundle = json.loads(good)
        bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(b"0" * 64).decode()
        return canonical_json(bundle)

    replace_signature(registry, catalogue, forge)
    with pytest.raises(SignatureError):
        pull_it(catalogue, tmp_path / "before", keys[1])
    publish(tmp_path / "bundle", catalogue, signer=parse_signer(keys[0]), verifier=parse_verifier(keys[1]))
    pull_it(catalogue, tmp_path / "after", keys[1])


# A writer without the key: names


@pytest.fixture
def two(catalogue: Catalogue, tmp_path: Path, keys: tuple[str, str]) -> list[Version]:
    """Two signed versions, old and new, of which the new one is in production."""
    signer = parse_signer(keys[0])
    found = []
    for number, name in enumerate(("1.3", "1.4")):
        bundle = write_bundle(tmp_path / name, spec=bytes([number]))
        found.append(publish(bundle, catalogue, label=name, signer=signer).version)
    promote(VersionRef("net", "1.4"), "production", catalogue, signer=signer)
    return found


def demanding(keys: tuple[str, str]) -> str:
    return f"key:public_key={keys[1]},signed_names=true"


def test_an_alias_cannot_shadow_a_label_or_a_digest(
    registry: str, catalogue: Catalogue, two: list[Version], keys: tuple[str, str], tmp_path: Path
) -> None:
    old, new = two
    for name in ("1.4", new.digest.removeprefix("sha256:")):
        with pytest.raises((ConflictError, RegistryError)):
            promote(VersionRef("net", "1.3"), name, catalogue)
    catalogue.backend.set_alias("net", "1.4", old)
    with pytest.raises(ConflictError, match=r"more than one version is called net@1\.4"):
        pull_it(catalogue, tmp_path / "out", version="1.4")
    # With signed names it is as if the alias were not there.
    assert pull_it(catalogue, tmp_path / "out", demanding(keys), "1.4") == new.digest
    short = new.digest.removeprefix("sha256:")[:12]
    with pytest.raises(NotPublishedError, match="a whole digest"):
        pull_it(catalogue, tmp_path / "short", version=short)
    catalogue.backend.set_alias("net", short, old)
    with pytest.raises(NotPublishedError):
        pull_it(catalogue, tmp_path / "short", demanding(keys), short)
    for full in (new.digest, new.digest.removeprefix("sha256:")):
        assert pull_it(catalogue, tmp_path / f"full{len(full)}", version=full) == new.digest


def claim_label(catalogue: Catalogue, registry: str, version: Version, label: str, at: str) -> Version:
    """A version of the same parts with a label of somebody's choice, under a file name that is free."""
    parts = [catalogue.read_part("net", part.digest) for part in version.parts]
    claim = build_version("net", parts, label=label, published_at=at)
    Path(registry, "net/versions", f"claim{len(at)}.json").write_bytes(claim.data)
    return claim


@pytest.mark.parametrize("at", ["2020-01-01T00:00:00+00:00", "2036-01-01T00:00:00+00:00"])
def test_a_second_claim_of_a_label_is_an_error_however_it_is_dated(
    registry: str, catalogue: Catalogue, two: list[Version], keys: tuple[str, str], tmp_path: Path, at: str
) -> None:
    old, new = two
    claim_label(catalogue, registry, old, "1.4", at)
    with pytest.raises(ConflictError, match=r"more than one version is called net@1\.4"):
        pull_it(catalogue, tmp_path / "out", keys[1], "1.4")
    assert pull_it(catalogue, tmp_path / "out", demanding(keys), "1.4") == new.digest
    assert pull_it(catalogue, tmp_path / "out", demanding(keys)) == new.digest, "nor is it the latest"


def test_an_alias_that_was_moved_without_the_key_does_not_count(
    catalogue: Catalogue, two: list[Version], keys: tuple[str, str], tmp_path: Path
) -> None:
    old, new = two
    assert pull_it(catalogue, tmp_path / "out", demanding(keys), "production") == new.digest
    catalogue.backend.set_alias("net", "production", old)
    assert pull_it(catalogue, tmp_path / "weak", keys[1], "production") == old.digest
    with pytest.raises(NotPublishedError):
        pull_it(catalogue, tmp_path / "strong", demanding(keys), "production")
    move = Move("production", old.digest, 99, "promote", "2036", signature={"forged": True})
    catalogue.backend.attach("net", old, MOVE, encode_move(move))
    with pytest.raises(NotPublishedError):
        pull_it(catalogue, tmp_path / "strong", demanding(keys), "production")


def test_an_older_signed_move_is_not_the_last(
    catalogue: Catalogue, two: list[Version], keys: tuple[str, str], tmp_path: Path
) -> None:
    old, new = two
    signer = parse_signer(keys[0])
    promote(VersionRef("net", "1.3"), "production", catalogue, signer=signer)
    rollback("net", "production", catalogue, signer=signer)
    assert pull_it(catalogue, tmp_path / "out", demanding(keys), "production") == new.digest
    catalogue.backend.set_alias("net", "production", old)
    with pytest.raises(NotPublishedError):
        pull_it(catalogue, tmp_path / "replayed", demanding(keys), "production")


def test_a_forged_move_that_leaves_no_number_is_an_error(
    catalogue: Catalogue, two: list[Version], tmp_path: Path
) -> None:
    old, new = two
    last = Move("production", new.digest, 2**31 - 1, "promote", "2036")
    catalogue.backend.attach("net", new, MOVE, encode_move(last))
    with pytest.raises(RegistryError, match="too many moves: net@production"):
        promote(VersionRef("net", old.digest), "production", catalogue)
    assert catalogue.read_state("net").aliases == {"production": new.digest}


# A writer without the key: parts


def test_a_publisher_who_demands_signatures_takes_over_no_unsigned_part(
    catalogue: Catalogue, keys: tuple[str, str], tmp_path: Path
) -> None:
    signer, verifier = parse_signer(keys[0]), parse_verifier(keys[1])
    foreign = publish(write_bundle(tmp_path / "foreign", made=(Made("cpu", HERE, b"evil"),)), catalogue)
    own = write_bundle(
        tmp_path / "own", made=(Made("cpu", ELSEWHERE),), created_at="2026-11-21T00:00:00+00:00"
    )
    published = publish(own, catalogue, signer=signer, verifier=verifier)
    assert published.version.part_digests == {published.part}
    late = publish(write_bundle(tmp_path / "late", made=(Made("cpu", HERE, b"late"),)), catalogue)
    assert published.part in late.version.part_digests, "whoever demands nothing merges everything"
    # The foreign part is the best for this machine; it is dropped before anything of it is read.
    blob = digest_bytes(b"evil").removeprefix("sha256:")
    assert foreign.part in late.version.part_digests or late.part in late.version.part_digests
    out = tmp_path / "out"
    request = PullRequest(VersionRef("net", late.version.digest), verifier=verifier)
    assert pull(request, catalogue, out, hardware=BARE).part == published.part
    assert not list((catalogue.cache.root / "files").rglob(blob))
    with pytest.raises(SignatureError, match="expected a valid signature of each part"):
        promote(
            VersionRef("net", late.version.digest),
            "production",
            catalogue,
            gate=PromotionGate(force=True, verifier=verifier),
            reason="must",
        )
    gate = PromotionGate(verifier=verifier)
    promote(VersionRef("net", published.version.digest), "production", catalogue, gate=gate)


def test_nothing_of_an_unsigned_part_is_read(
    catalogue: Catalogue, keys: tuple[str, str], tmp_path: Path
) -> None:
    publish(write_bundle(tmp_path / "foreign"), catalogue)
    opened: list[object] = []
    original = catalogue.backend.open_file
    catalogue.backend.open_file = lambda *args: opened.append(args) or original(*args)  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(SignatureError):
        pull_it(catalogue, tmp_path / "out", keys[1])
    assert opened == []


def test_a_certificate_needs_a_chain_and_a_name(catalogue: Catalogue, tmp_path: Path) -> None:
    key, _, authority = write_certificate(tmp_path / "ci", "ci.example.org")
    other_key, other_certificate, _ = write_certificate(tmp_path / "ci", "mallory", authority_of=key)
    for text in ("certificate", "certificate:subject=x", f"certificate:certificate_chain={authority}"):
        with pytest.raises(RegistryError, match="need more"):
            parse_verifier(text)
    weak = SignatureMethod("certificate", {}, subject="mallory")
    bundle = write_bundle(tmp_path / "bundle")
    options = f"private_key={other_key},signing_certificate={other_certificate},certificate_chain={authority}"
    publish(bundle, catalogue, signer=parse_signer(f"certificate:{options}"))
    chain = f"certificate:certificate_chain={authority}"
    pull_it(catalogue, tmp_path / "mallory", f"{chain},subject=mallory")
    with pytest.raises(SignatureError, match=r"expected a certificate of ci\.example\.org"):
        pull_it(catalogue, tmp_path / "out", f"{chain},subject=ci.example.org")
    with pytest.raises(SignatureError, match="expected the certificate chain of one"):
        pull(PullRequest(VersionRef("net", None), verifier=weak), catalogue, tmp_path / "web", hardware=BARE)


# What lies on this machine


def test_a_cached_bundle_that_was_rewritten_is_not_opened(catalogue: Catalogue, tmp_path: Path) -> None:
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


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    for mode in (0o777, 0o770, 0o702):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(CacheError, match="cache is not safe to use"):
            Cache(folder)
    inside = tmp_path / "own"
    Cache(inside)
    (inside / "bundles").chmod(0o777)
    with pytest.raises(CacheError, match="cache is not safe to use"):
        Cache(inside)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(CacheError, match="cache is not safe to use"):
        Cache(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(CacheError, match="cache is not safe to use"):
        Cache(folder)


def test_a_download_is_limited_in_size_and_time(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    monkeypatch.setenv(MAX_BYTES_VARIABLE, "100")
    with pytest.raises(RegistryError, match="too large: net"):
        pull_it(catalogue, tmp_path / "out")
    monkeypatch.setenv(MAX_BYTES_VARIABLE, "1000000")
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0")
    with pytest.raises(RegistryError, match="took too long: net"):
        pull_it(catalogue, tmp_path / "out")
    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    with pytest.raises(RegistryError, match="expected a whole number"):
        pull_it(catalogue, tmp_path / "out")
    monkeypatch.delenv(TIMEOUT_VARIABLE)
    pull_it(catalogue, tmp_path / "out")


@pytest.mark.parametrize("text", ["", "../up", "a@", "a@b@c", "a/b", "a@" + "x" * 300, "-x", "a@../b"])
def test_a_reference_is_a_name_or_refused(text: str) -> None:
    with pytest.raises(RegistryError, match="not a reference"):
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


def test_locations_name_a_registry_and_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    "path",
    [
        ".registry/pulled.json",
        ".registry/part.json",
        ".registry/signatures/x.json",
        ".registry",
        "golden.npz/below",
        "portable/net_optimized.onnx/x",
    ],
)
def test_a_part_cannot_put_a_file_where_a_puller_writes(
    registry: str, catalogue: Catalogue, tmp_path: Path, path: str
) -> None:
    part = read_part_bundle(write_bundle(tmp_path / "bundle")).part
    put_document(catalogue, registry, part, tampered(part, add_layer(path)))
    with pytest.raises(IntegrityError, match="conflicting path"):
        pull_it(catalogue, tmp_path / "out")


def test_documents_that_are_none_do_not_hide_the_others(
    registry: str, catalogue: Catalogue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = publish(write_bundle(tmp_path / "bundle"), catalogue, label="good").version
    promote(VersionRef("net", "good"), "production", catalogue)
    nested = b'{"artifactType":"application/vnd.ortprep.version.v1","a":' + b"[" * 900 + b"]" * 900 + b"}"
    lone = version.data.replace(b'"good"', b'"\\ud800"')
    for number, data in enumerate((b"junk", b"{}", nested, lone, b"\xff")):
        Path(registry, "net/versions", f"bad{number}.json").write_bytes(data)
    Path(registry, "net/aliases/bad").write_bytes(b"\xff")
    Path(registry, "net/aliases/dangling").write_text(DIGEST)
    for data in (b"junk", b'{"alias":1}', encode_move(Move("production", DIGEST, 9, "promote", "t"))):
        catalogue.backend.attach("net", version, MOVE, data)
    assert pull_it(catalogue, tmp_path / "out", version="production") == version.digest
    assert caplog.text.count("skipping a version") >= 4
    with pytest.raises(NotPublishedError, match="which does not exist"):
        pull_it(catalogue, tmp_path / "out", version="dangling")
    moves = catalogue.read_moves("net", [version])
    assert [(alias, [one.sequence for one in found]) for alias, found in moves.items()] == [
        ("production", [1])
    ]


def test_a_version_of_parts_of_another_model_is_refused(catalogue: Catalogue, tmp_path: Path) -> None:
    other: PublishResult = publish(write_bundle(tmp_path / "other", name="other"), catalogue)
    part = catalogue.read_part("other", other.part)
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    document = json.loads(build_version("other", [part], label="x", published_at="2036").data)
    document["annotations"]["org.opencontainers.image.title"] = "net"
    evil = parse_version(canonical_json(document))
    catalogue.backend.put_part("net", part)
    catalogue.backend.add_version("net", evil)
    with pytest.raises(IntegrityError, match="a part of another model"):
        pull_it(catalogue, tmp_path / "out", version="x")


def test_a_pipe_in_the_place_of_a_document_is_not_waited_for(
    registry: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    publish(write_bundle(tmp_path / "bundle"), catalogue)
    os.mkfifo(Path(registry, "net/versions/pipe.json"))
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
            verifier = f"certificate:certificate_chain={chain},subject={('one', 'two', 'three')[other]}"
            if other <= number:
                pull_it(catalogue, tmp_path / f"out{number}{other}", verifier)
            else:
                with pytest.raises(SignatureError):
                    pull_it(catalogue, tmp_path / f"no{number}{other}", verifier)


def test_a_signature_is_what_the_tool_of_model_signing_verifies(
    signed: Path, catalogue: Catalogue, tmp_path: Path, keys: tuple[str, str]
) -> None:
    (version,) = catalogue.read_state("net").versions.values()
    (found,) = catalogue.read_signatures(catalogue.read_part("net", version.parts[0].digest))
    signature = tmp_path / "model.sig"
    signature.write_bytes(found)
    tool = [sys.executable, "-m", "model_signing", "verify", "key", str(signed)]
    command = [*tool, "--signature", str(signature), "--public_key", keys[1]]
    command += ["--ignore-paths", str(signed / ".registry/pulled.json")]
    done = subprocess.run(command, capture_output=True, timeout=600, check=False, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (signed / "golden.npz").unlink()
    (signed / "golden.npz").write_bytes(b"changed")
    assert subprocess.run(command, capture_output=True, timeout=600, check=False).returncode != 0


def test_a_demand_for_signed_names_is_true_or_false_and_nothing_else() -> None:
    assert parse_verifier("key:public_key=k,signed_names=True").signed_names
    assert not parse_verifier("key:public_key=k,signed_names=false").signed_names
    with pytest.raises(RegistryError, match="expected true or false"):
        parse_verifier("key:public_key=k,signed_names=yes")


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
    with pytest.raises(RegistryError, match="secrets cannot be options") as raised:
        parse_signer(text)
    assert "hunter2" not in str(raised.value)
