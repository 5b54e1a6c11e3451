"""What a signature covers, and every way around it that is refused."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from ortprep.bundle.digest import digest_bytes
from ortprep.cli import registry_commands
from ortprep.errors import (
    IntegrityError,
    PipelineError,
    RegistryError,
    RegistryUnavailableError,
    SignatureError,
)
from ortprep.registry.backend import Kind
from ortprep.registry.promotion import PromotionGate, promote
from ortprep.registry.publish import publish
from ortprep.registry.pull import PullRequest, pull, pull_cached
from ortprep.registry.references import VersionRef
from ortprep.registry.signatures import (
    MAX_SIGNATURE_BYTES,
    PASSWORD_VARIABLE,
    read_receipt,
    sign_part,
    verify_bundle,
    verify_part,
)
from ortprep.runtime.loading.sources import locate
from tests.registry.builders import (
    BARE,
    ELSEWHERE,
    HERE,
    Build,
    Made,
    make_part,
    read_tree,
    write_bundle,
    write_keys,
    write_ref,
)

pytestmark = pytest.mark.attack


@pytest.fixture
def kind():
    return "directory"


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path / "keys")


@pytest.fixture
def signed(catalogue, tmp_path, keys):
    """A bundle of two variants, published, signed and pulled."""
    bundle = write_bundle(
        tmp_path / "bundle", made=(Made("cpu", ELSEWHERE, b"c"), Made("portable", weights=b"p"))
    )
    publish(bundle, catalogue, private_key=keys[0])
    pull_it(catalogue, tmp_path / "pulled")
    return tmp_path / "pulled"


def pull_it(catalogue, out, public_key=None, *, model="net"):
    request = PullRequest(VersionRef(model, None), public_key=public_key)
    return pull(request, catalogue, out, hardware=BARE).version


def part_of(catalogue):
    (version,) = catalogue.read_state("net").versions.values()
    return catalogue.read_part("net", version.parts[0].digest)


# A pulled bundle


def test_a_pulled_bundle_can_be_verified_again_without_the_registry(signed, keys):
    assert verify_bundle(signed, keys[1]).model == "net"
    assert locate(signed, require_signature=keys[1]) == signed


def test_f21_one_changed_byte_of_a_signed_bundle_or_its_receipt_is_always_reported(signed, keys):
    paths = [path for path in sorted(signed.rglob("*")) if path.is_file()]
    assert len(paths) > 8
    for path in paths:
        if path.name == "pulled.json":
            continue  # it proves nothing by itself
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with pytest.raises(PipelineError) as raised:
            verify_bundle(signed, keys[1])
        assert raised.value.exit_code == 3
        path.write_bytes(data)


def test_a_file_that_was_added_or_removed_is_reported(signed, keys):
    (signed / "added.bin").write_bytes(b"x")
    with pytest.raises(IntegrityError, match=r"added\.bin: added"):
        verify_bundle(signed, keys[1])
    (signed / "added.bin").unlink()
    for path in (".registry/setup.py", ".registry/README.md", ".registry/more/x"):
        data = (signed / path).read_bytes() if (signed / path).exists() else None
        if data is None:
            (signed / path).parent.mkdir(exist_ok=True)
            (signed / path).write_bytes(b"x")
            with pytest.raises(IntegrityError, match=f"{path}: added"):
                verify_bundle(signed, keys[1])
            (signed / path).unlink()
    (signed / "golden.npz").unlink()
    with pytest.raises(IntegrityError, match=r"golden\.npz: missing"):
        verify_bundle(signed, keys[1])


def test_a_bundle_that_someone_else_wrote_anew_is_refused(signed, keys, tmp_path):
    other = write_bundle(tmp_path / "other", made=(Made("portable", weights=b"evil"),))
    for name, data in read_tree(other).items():
        (signed / name).unlink(missing_ok=True)
        (signed / name).write_bytes(data)
    with pytest.raises(IntegrityError, match=r"portable/net_optimized\.onnx\.data: size"):
        verify_bundle(signed, keys[1])


def test_only_what_is_signed_is_said_to_be(signed, keys, capsys):
    receipt = json.loads((signed / ".registry/pulled.json").read_bytes())
    forged = receipt | {"version": f"sha256:{'0' * 64}", "reference": "net@production", "part": "sha256:1"}
    (signed / ".registry/pulled.json").write_text(json.dumps(forged))
    for json_too in (True, False):
        registry_commands.verify(str(signed), keys[1], json=json_too)
        shown = "".join(capsys.readouterr())
        assert receipt["part"] in shown
        assert forged["version"] not in shown
        assert "production" not in shown


# Another model, other digests


def test_a_signature_under_another_models_name_is_refused(registry, catalogue, signed, keys, tmp_path):
    shutil.copytree(Path(registry, "net"), Path(registry, "other"))
    (version,) = Path(registry, "other/versions").iterdir()
    forged = version.read_bytes().replace(b'image.title":"net"', b'image.title":"other"')
    version.unlink()
    write_ref(registry, "other", Kind.VERSION, forged, "1")
    with pytest.raises(IntegrityError, match=r"part of another model: .*\n.*expected other, got net"):
        pull_it(catalogue, tmp_path / "out", keys[1], model="other")


@pytest.mark.parametrize("changed", ["model", "source", "spec", "file", "path"])
def test_a_signature_of_one_part_is_none_of_a_part_that_differs_in_anything(keys, changed):
    part = make_part("net", {"loader.json": b"1"})
    other = {
        "model": make_part("other", {"loader.json": b"1"}),
        "source": make_part("net", {"loader.json": b"1"}, source=digest_bytes(b"evil")),
        "spec": make_part("net", {"loader.json": b"1"}, spec=digest_bytes(b"evil")),
        "file": make_part("net", {"loader.json": b"2"}),
        "path": make_part("net", {"loader2.json": b"1"}),
    }[changed]
    signature = sign_part(part, keys[0])
    verify_part(part, [signature], keys[1])
    with pytest.raises(SignatureError, match=f"{other.digest}(.|\n)*got 1 of something else"):
        verify_part(other, [signature], keys[1])


def test_the_signature_of_another_part_does_not_count(catalogue, signed, keys, tmp_path):
    ((good,),) = catalogue.read_signatures(part_of(catalogue)).values()
    evil = write_bundle(tmp_path / "evil", Build((Made("portable", weights=b"evil"),), spec=b"x"))
    published = publish(evil, catalogue)
    catalogue.attach_signature(catalogue.read_part("net", published.part), good)
    with pytest.raises(SignatureError, match=f"{published.part}(.|\n)*got 1 of something else"):
        pull_it(catalogue, tmp_path / "out", keys[1])


# Signatures that are none


@pytest.mark.parametrize(
    "data", [b"", b"junk", b"{}", b"AAAA", b"A" * 10**6, b"\xff", b" " * MAX_SIGNATURE_BYTES]
)
def test_a_signature_that_is_none_does_not_stand_in_the_way_of_one(keys, data):
    part = make_part("net", {"loader.json": b"1"})
    good = sign_part(part, keys[0])
    verify_part(part, [data + good if data.isspace() else data, good], keys[1])
    with pytest.raises(SignatureError, match="no valid signature: net"):
        verify_part(part, [data + good if data.isspace() else data], keys[1])


def test_a_forged_signature_does_not_keep_the_real_one_out(registry, catalogue, signed, keys, tmp_path):
    part = part_of(catalogue)
    ((good,),) = catalogue.read_signatures(part).values()
    for path in Path(registry, "net/signatures").iterdir():
        path.unlink()
    catalogue.attach_signature(part, good[:-8] + b"AAAAAA==")
    with pytest.raises(SignatureError):
        pull_it(catalogue, tmp_path / "before", keys[1])
    publish(tmp_path / "bundle", catalogue, private_key=keys[0], public_key=keys[1])
    pull_it(catalogue, tmp_path / "after", keys[1])
    assert publish(tmp_path / "bundle", catalogue, private_key=keys[0]).is_new is False
    assert len(catalogue.read_signatures(part)[part.digest]) == 2, "and a valid one is not made twice"


def test_many_forged_signatures_do_not_crowd_out_the_real_one(catalogue, signed, keys, tmp_path):
    """A pulled bundle keeps some signatures only; anybody who may push can attach more."""
    part = part_of(catalogue)
    for number in range(200):
        catalogue.attach_signature(part, base64.b64encode(number.to_bytes(64, "big")))
    pull_it(catalogue, tmp_path / "out", keys[1])
    assert verify_bundle(tmp_path / "out", keys[1]) == part
    receipt = json.loads((tmp_path / "out/.registry/pulled.json").read_bytes())
    assert len(receipt["signatures"]) < 100
    (tmp_path / "out/.registry/pulled.json").write_text(json.dumps({**receipt, "signatures": ["x"] * 10**5}))
    with pytest.raises(SignatureError) as raised:
        verify_bundle(tmp_path / "out", keys[1])
    assert len(str(raised.value)) < 4000


# Parts of others


def test_a_publisher_who_demands_signatures_takes_over_no_unsigned_part(catalogue, keys, tmp_path):
    foreign = publish(write_bundle(tmp_path / "foreign", made=(Made("cpu", HERE, b"evil"),)), catalogue)
    own = write_bundle(
        tmp_path / "own", made=(Made("cpu", ELSEWHERE),), created_at="2026-11-21T00:00:00+00:00"
    )
    published = publish(own, catalogue, private_key=keys[0], public_key=keys[1])
    assert published.version.part_digests == {published.part}
    late = publish(write_bundle(tmp_path / "late", made=(Made("cpu", HERE, b"late"),)), catalogue)
    assert published.part in late.version.part_digests, "whoever demands nothing merges everything"
    # The foreign part is the best for this machine; it is dropped before anything of it is read.
    blob = digest_bytes(b"evil")
    assert foreign.part in late.version.part_digests or late.part in late.version.part_digests
    request = PullRequest(VersionRef("net", late.version.digest), public_key=keys[1])
    assert pull(request, catalogue, tmp_path / "out", hardware=BARE).part == published.part
    assert blob not in {digest_bytes(data) for data in read_tree(tmp_path / "out").values()}
    with pytest.raises(SignatureError, match="expected a valid signature of each part"):
        promote(
            VersionRef("net", late.version.digest),
            "production",
            catalogue,
            gate=PromotionGate(force=True, public_key=keys[1]),
        )
    gate = PromotionGate(public_key=keys[1])
    promote(VersionRef("net", published.version.digest), "production", catalogue, gate=gate)


def test_the_gate_compares_with_nothing_that_is_unsigned(catalogue, keys, tmp_path):
    """Anybody who may write can make an alias name a version so bad that any other is better."""

    def publish_it(label, ready_ms, **options):
        bundle = write_bundle(
            tmp_path / label, spec=label.encode(), made=(Made("portable", init_ms=ready_ms),)
        )
        return publish(bundle, catalogue, label=label, **options)

    def promote_slow(**options):
        gate = PromotionGate(public_key=keys[1], **options)
        return promote(VersionRef("net", "slow"), "production", catalogue, gate=gate)

    publish_it("fast", 10.0, private_key=keys[0])
    promote(VersionRef("net", "fast"), "production", catalogue, gate=PromotionGate(public_key=keys[1]))
    publish_it("slow", 90.0, private_key=keys[0])
    with pytest.raises(RegistryError, match="instead of"):
        promote_slow()
    evil = publish_it("evil", 1e6)
    catalogue.backend.put_ref("net", Kind.ALIAS, "production", evil.version.data)
    read = []
    fetch = catalogue.fetch_records
    catalogue.fetch_records = lambda part, folder: read.append(part.digest) or fetch(part, folder)
    with pytest.raises(RegistryError, match=f"no valid signature: net .{evil.part}") as refused:
        promote_slow()
    assert "--force" in str(refused.value.hint)
    assert promote_slow(force=True).forced
    assert read
    assert evil.part not in read


def test_nothing_of_an_unsigned_part_is_read(catalogue, keys, tmp_path):
    publish(write_bundle(tmp_path / "foreign"), catalogue)
    opened = []
    catalogue.backend.open_file = lambda *args: opened.append(args)
    with pytest.raises(SignatureError):
        pull_it(catalogue, tmp_path / "out", keys[1])
    assert opened == []


# Keys, and the tool


def test_openssl_verifies_the_same(signed, tmp_path, keys):
    receipt = json.loads((signed / ".registry/pulled.json").read_bytes())
    document, signature = signed / ".registry/part.json", tmp_path / "part.sig"
    signature.write_bytes(base64.b64decode(receipt["signatures"][0]))
    tool = ["openssl", "dgst", "-sha256", "-verify", str(keys[1]), "-signature", str(signature)]
    assert subprocess.run([*tool, str(document)], capture_output=True, check=False).returncode == 0
    document.write_bytes(document.read_bytes() + b"\n")
    assert subprocess.run([*tool, str(document)], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize(
    "key", [ec.generate_private_key(ec.SECP192R1()), rsa.generate_private_key(65537, 2048)]
)
def test_a_key_of_another_kind_signs_and_verifies_nothing(tmp_path, keys, key):
    part = make_part("net", {"loader.json": b"1"})
    private, public = tmp_path / "own.pem", tmp_path / "own.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(SignatureError, match="expected one of secp256r1"):
        sign_part(part, private)
    with pytest.raises(SignatureError, match="expected one of secp256r1"):
        verify_part(part, [sign_part(part, keys[0])], public)


def test_a_key_with_a_password_needs_it(tmp_path, monkeypatch):
    private, public = write_keys(tmp_path / "locked", password=b"hunter2")
    part = make_part("net", {"loader.json": b"1"})
    with pytest.raises(SignatureError, match="cannot sign net") as raised:
        sign_part(part, private)
    assert raised.value.hint == f"export {PASSWORD_VARIABLE}=…"
    monkeypatch.setenv(PASSWORD_VARIABLE, "hunter2")
    verify_part(part, [sign_part(part, private)], public)


@pytest.mark.parametrize("attack", ["another key under the same path", "no signature any more"])
def test_what_was_pulled_before_gets_round_no_signature(
    signed, catalogue, keys, tmp_path, monkeypatch, attack
):
    """A version in the cache serves while the registry cannot be reached, if this key verifies it."""
    reference = VersionRef("net", read_receipt(signed).version)
    request = PullRequest(reference, public_key=keys[1])
    pulled = pull_cached(request, catalogue, hardware=BARE)
    if attack == "no signature any more":
        for file in Path(catalogue.backend.url, "net/signatures").iterdir():
            file.unlink()
        with pytest.raises(SignatureError):
            pull_cached(request, catalogue, hardware=BARE)
        return

    def fail(*_):
        raise RegistryUnavailableError("status 503")

    monkeypatch.setattr(catalogue.backend, "list_refs", fail)
    assert pull_cached(request, catalogue, hardware=BARE).path == pulled.path
    shutil.copy(write_keys(tmp_path / "new")[1], keys[1])
    with pytest.raises(RegistryUnavailableError):
        pull_cached(request, catalogue, hardware=BARE)


@pytest.mark.parametrize("content", [None, b"", b"junk", b"-----BEGIN CERTIFICATE-----\n"])
def test_what_is_no_key_verifies_nothing(keys, tmp_path, content):
    part, key = make_part("net", {"loader.json": b"1"}), tmp_path / "other.pub"
    good = sign_part(part, keys[0])
    if content is not None:
        key.write_bytes(content)
    with pytest.raises(SignatureError, match=f"no valid signature: net.*\n  expected one by {key}"):
        verify_part(part, [good], key)
    with pytest.raises(SignatureError, match="cannot sign net"):
        sign_part(part, key)
