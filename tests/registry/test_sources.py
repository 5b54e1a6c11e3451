"""Laws of a required signature: nothing but the bytes that were signed becomes a session."""

import numpy as np
import pytest

import ortprep
from ortprep.bundle import digest
from ortprep.bundle.digest import DigestCache, digest_file
from ortprep.errors import BundleError, IntegrityError, SignatureError
from ortprep.registry import sources
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.publish import publish
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef
from ortprep.runtime import PoolConfig, SessionPool, load, load_before_fork
from ortprep.runtime.host.models import HostConfig, ModelTable
from ortprep.runtime.loading import forking
from ortprep.runtime.loading.load_options import NO_DEADLINE
from tests.fakes import wait_for_a_tick
from tests.registry.builders import write_keys
from tests.runtime.builders import sample, weights_of, write_bundle
from tests.runtime.dropin.builders import is_of_bundle, write_bundle_of, write_source

DATA = "cpu/linear_optimized.onnx.data"


@pytest.fixture
def key(tmp_path):
    return write_keys(tmp_path / "keys")[1]


def sign(bundle, key, out):
    """Publishes a bundle, signs it and pulls it; returns the pulled one."""
    with open_catalogue(str(bundle.parent / "registry")) as catalogue:
        publish(bundle, catalogue, private_key=key.with_name("key.pem"))
        pull(PullRequest(VersionRef("linear", None)), catalogue, out)
    return out


@pytest.fixture
def signed(tmp_path, key):
    return sign(write_bundle(tmp_path / "linear"), key, tmp_path / "pulled")


def change_weights(path):
    """Puts other weights in a file's place, and remembers the digest of the old ones for them."""
    digest = digest_file(path)
    path.unlink()
    path.write_bytes(weights_of(9).tobytes())
    wait_for_a_tick(path)
    DigestCache().record(path, digest)


def test_a_load_hashes_nothing_of_what_was_pulled(signed, monkeypatch):
    def refuse(*_):
        raise AssertionError("hashed again")

    monkeypatch.setattr(digest, "_digest_open", refuse)
    monkeypatch.setattr(digest, "BlockDigest", refuse)
    (answer,) = load(signed).run(None, {"x": sample()})
    np.testing.assert_allclose(answer, sample() @ weights_of(0), rtol=1e-5)


def test_what_was_signed_loads(signed, key):
    (answer,) = load(signed, require_signature=key, digests="off").run(None, {"x": sample()})
    np.testing.assert_allclose(answer, sample() @ weights_of(0), rtol=1e-5)


@pytest.mark.attack
def test_a_remembered_digest_does_not_count_where_a_signature_is_required(signed, key):
    change_weights(signed / DATA)
    load(signed)  # the digest is believed
    with pytest.raises(IntegrityError, match=DATA):
        load(signed, require_signature=key)


@pytest.mark.attack
def test_no_worker_believes_a_remembered_digest_either(signed, key):
    change_weights(signed / DATA)
    config = PoolConfig(devices=["cpu"], require_signature=key, max_restarts=0)
    with pytest.raises(IntegrityError, match=DATA):
        SessionPool(signed, config)


@pytest.mark.attack
def test_a_bundle_put_in_place_after_the_signature_was_verified_is_not_opened(signed, key, monkeypatch):
    verify = sources.locate

    def verify_then_replace(*args, **options):
        monkeypatch.setattr(sources, "locate", verify)
        verified = verify(*args, **options)
        for path in signed.rglob("*"):
            if path.is_file() and ".registry" not in path.parts:
                path.unlink()
        write_bundle(signed, seed=9)
        return verified

    monkeypatch.setattr(sources, "locate", verify_then_replace)
    with pytest.raises(IntegrityError, match=r"not the file that was recorded: .*loader\.json"):
        load(signed, require_signature=key)


@pytest.mark.attack
def test_one_changed_byte_in_any_file_of_a_signed_bundle_is_refused(signed, key):
    paths = [path for path in sorted(signed.rglob("*")) if path.is_file() and path.name != "pulled.json"]
    assert len(paths) > 5
    for path in paths:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with pytest.raises(BundleError):
            load(signed, require_signature=key)
        path.write_bytes(data)
    (signed / "added.bin").write_bytes(b"x")
    with pytest.raises(IntegrityError, match=r"added\.bin: added"):
        load(signed, require_signature=key)


@pytest.mark.attack
def test_the_signature_of_another_key_is_refused(signed, tmp_path):
    _, other = write_keys(tmp_path / "other")
    with pytest.raises(SignatureError):
        load(signed, require_signature=other)


def test_a_drop_in_session_is_of_the_bundle_that_was_signed(tmp_path, key, monkeypatch):
    model = write_source(tmp_path / "application" / "linear.onnx")
    monkeypatch.setenv("ORTPREP_REQUIRE_SIGNATURE", str(key))
    bundle = sign(write_bundle_of(model, tmp_path / "linear"), key, tmp_path / "pulled")
    monkeypatch.setenv("ORTPREP_BUNDLES", str(bundle))
    assert is_of_bundle(ortprep.session(model, providers=["CPUExecutionProvider"]))


def open_in_pool(bundle, *, require_signature):
    SessionPool(bundle, PoolConfig(devices=["cpu"], require_signature=require_signature)).close()


def open_in_host(bundle, *, require_signature):
    with ModelTable(HostConfig(require_signature=str(require_signature))).use(str(bundle), NO_DEADLINE):
        pass


@pytest.mark.attack
@pytest.mark.parametrize("is_pulled", [False, True])
@pytest.mark.parametrize("open_it", [sources.locate, load, load_before_fork, open_in_pool, open_in_host])
def test_nothing_opens_what_was_not_signed(tmp_path, key, monkeypatch, open_it, is_pulled):
    monkeypatch.setattr(forking, "has_telemetry_thread", lambda: False)
    bundle = str(write_unsigned(tmp_path, write_bundle(tmp_path / "linear"), is_pulled=is_pulled))
    with pytest.raises(SignatureError if is_pulled else BundleError):
        open_it(bundle, require_signature=key)
    with pytest.raises(SignatureError if is_pulled else BundleError):
        open_it(bundle, require_signature=tmp_path / "no-such-key.pub")


@pytest.mark.attack
@pytest.mark.parametrize("is_pulled", [False, True])
def test_no_drop_in_session_is_of_a_bundle_that_was_not_signed(tmp_path, key, monkeypatch, caplog, is_pulled):
    model = write_source(tmp_path / "application" / "linear.onnx")
    bundle = write_bundle_of(model, tmp_path / "linear")
    monkeypatch.setenv("ORTPREP_BUNDLES", str(write_unsigned(tmp_path, bundle, is_pulled=is_pulled)))
    for required in (key, tmp_path / "no-such-key.pub"):
        caplog.clear()
        monkeypatch.setenv("ORTPREP_REQUIRE_SIGNATURE", str(required))
        assert not is_of_bundle(ortprep.session(model, providers=["CPUExecutionProvider"]))
        assert "WARNING" in {record.levelname for record in caplog.records}


def write_unsigned(folder, bundle, *, is_pulled):
    """Returns the bundle, or what a registry makes of it."""
    if not is_pulled:
        return bundle
    with open_catalogue(str(folder / "registry")) as catalogue:
        publish(bundle, catalogue)
        pull(PullRequest(VersionRef("linear", None)), catalogue, folder / "pulled")
    return folder / "pulled"
