"""The OCI backend against Debian's registry, with a proxy between them that does what networks do."""

import base64
import dataclasses
import json
import logging
import os
import subprocess
import time
import traceback
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import requests
import responses

from ortprep.bundle.digest import digest_bytes
from ortprep.errors import AccessDeniedError, NotPublishedError, RegistryError, RegistryUnavailableError
from ortprep.registry.backend import Kind, ref_name, subject_digits
from ortprep.registry.backends import oci
from ortprep.registry.backends.http_client import HttpClient
from ortprep.registry.backends.oci import OciBackend
from ortprep.registry.backends.oci_auth import OciClient, read_credentials
from ortprep.registry.catalogue import Catalogue, open_catalogue
from ortprep.registry.documents import INDEX, MANIFEST, parse_version
from ortprep.registry.garbage_collection import RetentionPolicy, collect
from ortprep.registry.publish import publish as publish_bundle
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef
from tests.registry.builders import (
    BARE,
    HERE,
    Made,
    list_versions,
    make_part,
    make_version,
    name_of,
    put_part,
    read_file,
    read_part,
    read_tree,
    write_bundle,
    write_files,
)
from tests.registry.fault_proxy import Fault, fault_proxy
from tests.registry.servers import PASSWORD, USER, oci_server

MODEL = "tiny"
BIG = bytes(range(256)) * 5000


@pytest.fixture(scope="module")
def server(oci):
    return oci


@pytest.fixture(scope="module")
def shared_proxy(server):
    with fault_proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy):
    shared_proxy.clear()
    return shared_proxy


_counts = iter(range(1000))


@pytest.fixture
def backend(proxy):
    one = OciBackend(oci_url(proxy.url), timeout_s=(120, 120))
    yield one
    one.close()


def oci_url(url):
    """Returns a prefix that no other test uses."""
    return f"oci+{url}/team-{next(_counts)}/models"


def repository(backend):
    return backend.url.partition("://")[2].partition("/")[2] + f"/{MODEL}"


def api(backend, path):
    return f"http://{backend.url.partition('://')[2].partition('/')[0]}/v2/{repository(backend)}/{path}"


FILES = {
    "manifest.json": b"{}",
    "loader.json": b'{"a": 1}',
    "cpu-fp32/model.onnx": b"model" * 100,
    "cpu-int8/model.onnx": b"other" * 100,
    "gpu/model.onnx": b"third" * 100,
    "gpu/empty.bin": b"",
}


def part_of(files, created_at="2026-01-02T03:04:05Z"):
    return make_part(MODEL, files, created_at=created_at)


def delete(backend, version):
    backend.delete_version(MODEL, name_of(version))


def upload(backend, tmp_path, data):
    part = part_of({"big.bin": data})
    backend.put_file(part, part.files[0], write_files(tmp_path, {"big.bin": data}) / "big.bin")


def download(backend, data, offset=0):
    return read_file(backend, part_of({"big.bin": data}), "big.bin", offset)


def publish(backend, tmp_path, label="1.0", created_at="2026-01-02T03:04:05Z"):
    """Publishes the files under a label."""
    part = part_of(FILES, created_at)
    put_part(backend, part, write_files(tmp_path / "files", FILES))
    version = make_version(part, label)
    backend.put_ref(MODEL, Kind.VERSION, name_of(version), version.data)
    backend.put_label(MODEL, label, version.data)
    return version


# Documents


@pytest.mark.attack
def test_a_tag_cannot_have_a_live_version_or_part_removed(backend, tmp_path):
    """As somebody who may push but not delete would try."""
    live, catalogue = publish(backend, tmp_path, "2.0", "2026-05-05T00:00:00Z"), Catalogue(backend)
    gone, (part,) = publish(backend, tmp_path), live.parts
    live_part = catalogue.read_part(MODEL, part.digest)
    catalogue.attach_signature(live_part, b"{}")
    (attached,) = backend.list_refs(MODEL, Kind.SIGNATURE).values()
    for digest in (live.digest, part.digest, attached):
        accept = {"Accept": f"{INDEX}, {MANIFEST}"}
        found = requests.get(api(backend, f"manifests/{digest}"), headers=accept, timeout=300)
        for subject in (gone.digest, digest_bytes(b"none")):
            tag = "_s." + ref_name(digest, subject_digits(subject))
            pushed = {"Content-Type": found.headers["Content-Type"]}
            url = api(backend, f"manifests/{tag}")
            requests.put(url, found.content, headers=pushed, timeout=300).raise_for_status()
        url = api(backend, f"manifests/_b.{ref_name(digest)}.1")
        requests.put(url, found.content, headers=pushed, timeout=300).raise_for_status()
        # A version's tag that names a part or a signature.
        if digest != live.digest:
            url = api(backend, f"manifests/_v.{ref_name(digest, 'x')}")
            requests.put(url, found.content, headers=pushed, timeout=300).raise_for_status()
    backend.put_ref(MODEL, Kind.ALIAS, "production", live.data)
    collect(MODEL, catalogue, policy=RetentionPolicy(0, 0, 0), dry_run=False)
    swept = backend.sweep(MODEL, [live_part], grace_s=0, dry_run=False)
    assert swept.parts == (gone.parts[0].digest,)
    assert gone.digest not in list_versions(backend, MODEL)
    assert list(catalogue.read_state(MODEL).versions) == [live.digest]
    assert read_part(backend, part.digest, MODEL)
    again = Catalogue(backend).read_signatures(live_part)
    assert again == {part.digest: (b"{}",)}


def test_pages_of_tags_are_followed(backend, proxy, tmp_path):
    version = publish(backend, tmp_path)
    page = json.dumps({"tags": ["_v.unknown", "_x", "1.0"]}).encode()
    following = f'</v2/{repository(backend)}/tags/list?n=1&last=x>; rel="next"'
    proxy.faults.append(Fault("replace", path="tags/list", body=page, headers={"Link": following}))
    assert list_versions(backend, MODEL) == [version.digest]
    assert ("GET", f"/v2/{repository(backend)}/tags/list?n=1&last=x") in proxy.requests


@pytest.mark.attack
def test_pages_that_never_end_and_pages_elsewhere_are_refused(backend, proxy):
    for following in (f"</v2/{repository(backend)}/tags/list?n=1>", "<http://192.0.2.1/v2/x>"):
        headers = {"Link": f'{following}; rel="next"'}
        proxy.faults[:] = [
            Fault("replace", path="tags/list", body=b'{"tags":[]}', times=2, status=200, headers=headers)
        ]
        with pytest.raises(RegistryError, match="bad next page"):
            list_versions(backend, MODEL)


@pytest.mark.attack
def test_pages_of_a_few_huge_names_are_not_collected(backend, monkeypatch):
    numbers = iter(range(100))

    def answer(*_, **__):
        link = f'</v2/{repository(backend)}/tags/list?last={next(numbers)}>; rel="next"'
        return SimpleNamespace(headers={"Link": link}), json.dumps({"tags": ["x" * 2**24]}).encode()

    monkeypatch.setattr(HttpClient, "ask", answer)
    with pytest.raises(RegistryError, match="names of together"):
        list_versions(backend, MODEL)
    assert next(numbers) < 10


@pytest.mark.parametrize("model", ["Upper", "a/b", "a..b", "-a", "x" * 250, "ä"])
def test_names_that_are_no_repositories_are_refused(backend, model):
    with pytest.raises(RegistryError, match="not a name for an OCI registry"):
        list_versions(backend, model)


@pytest.mark.parametrize(
    "url",
    ["oci://", "oci://host name/x", "oci://host/Upper", "oci://host/a?b=c", "s3://host/x", "oci://h:x/y"],
)
def test_other_urls_are_refused(url):
    with pytest.raises(RegistryError):
        OciBackend(url)


# Files


def test_a_cut_upload_begins_again(backend, proxy, tmp_path):
    proxy.faults += [
        Fault("cut_request", method="PUT", at_bytes=1000),
        Fault("cut_request", method="PUT", at_bytes=300_000, forward=False),
        Fault("cut_answer", method="PUT", path="uploads/"),
    ]
    upload(backend, tmp_path, BIG)
    # The proxy may still be closing the connection it cut, and a backend asks once.
    backend.close()
    assert download(backend, BIG) == BIG


@pytest.mark.attack
def test_redirects_are_followed_without_credentials(backend, proxy, server, tmp_path):
    data = b"kept elsewhere"
    upload(backend, tmp_path, data)
    with fault_proxy(server.url) as elsewhere, oci_login(tmp_path, proxy.url):
        target = f"{elsewhere.url}/v2/{repository(backend)}/blobs/{digest_bytes(data)}"
        challenge = {"WWW-Authenticate": 'Basic realm="tests"'}
        proxy.faults += [
            Fault("status", path="blobs/", status=401, headers=challenge),
            Fault("status", path="blobs/", status=307, headers={"Location": target}),
        ]
        assert download(backend, data, 5) == data[5:]
        assert "Authorization" in proxy.headers[-1]
        assert "Authorization" not in elsewhere.headers[-1]
        assert elsewhere.headers[-1]["Range"] == "bytes=5-"


# What goes wrong


@pytest.mark.parametrize(("status", "kind"), [(403, AccessDeniedError), (409, RegistryError)])
def test_a_refusal_has_the_registrys_code_and_none_of_its_words(backend, proxy, status, kind):
    body = b'{"errors":[{"code":"SOME_CODE","message":"with secrets in it"}]}'
    proxy.faults.append(Fault("status", path="manifests", status=status, times=9, body=body))
    with pytest.raises(kind, match="SOME_CODE") as caught:
        read_part(backend, digest_bytes(b""), MODEL)
    assert "secrets" not in str(caught.value)
    assert ("docker login" in str(caught.value)) == (kind is AccessDeniedError)


def test_a_push_that_met_another_one_is_tried_again(backend, proxy, tmp_path):
    body = b'{"errors":[{"code":"DIGEST_INVALID"}]}'
    proxy.faults.append(Fault("status", method="PUT", path="manifests/_v", status=400, body=body))
    version = publish(backend, tmp_path)
    assert proxy.faults[0].times == 0
    assert list_versions(backend, MODEL) == [version.digest]


def test_a_registry_without_tls_is_not_spoken_to_in_plain(proxy):
    backend = OciBackend(oci_url(proxy.url).replace("oci+http", "oci"), timeout_s=(10, 2))
    with pytest.raises(RegistryError):
        list_versions(backend, MODEL)
    assert proxy.requests == []
    backend.close()


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b'{"tags": 1}', b'{"tags": [1]}', b"\xff", b"[" * 100_000]
)
def test_an_answer_that_is_no_list_is_an_error(backend, proxy, body):
    proxy.faults.append(Fault("replace", path="tags/list", status=200, body=body))
    with pytest.raises(RegistryError):
        list_versions(backend, MODEL)


# What other tools see


def test_an_index_stands_under_its_label_and_aliases(backend, tmp_path):
    version, part = publish(backend, tmp_path), part_of(FILES)
    backend.put_ref(MODEL, Kind.ALIAS, "prod", version.data)
    for name in ("1.0", "prod", version.digest):
        answer = requests.get(api(backend, f"manifests/{name}"), headers={"Accept": INDEX}, timeout=300)
        assert answer.content == version.data
    index = answer.json()
    assert answer.headers["Content-Type"] == index["mediaType"] == INDEX
    assert index["annotations"]["org.opencontainers.image.version"] == "1.0"
    (listed,) = index["manifests"]
    assert listed["platform"] == {"architecture": "amd64", "os": "linux"}
    assert "CPUExecutionProvider" in listed["annotations"]["dev.ortprep.record"]
    path = f"manifests/{listed['digest']}"
    answer = requests.get(api(backend, path), headers={"Accept": MANIFEST}, timeout=300)
    assert answer.content == part.data
    assert len(answer.content) == listed["size"]
    layers = answer.json()["layers"]
    assert {one["annotations"]["org.opencontainers.image.title"] for one in layers} == set(FILES)
    for layer in layers:
        blob = requests.get(api(backend, f"blobs/{layer['digest']}"), timeout=300).content
        assert blob == FILES[layer["annotations"]["org.opencontainers.image.title"]]


def test_a_part_without_a_version_goes_after_the_grace_period_unless_it_is_refreshed(
    backend, tmp_path, monkeypatch
):
    version, catalogue, now_s = publish(backend, tmp_path), Catalogue(backend), time.time()
    (part,) = version.parts
    delete(backend, version)

    def sweep(at_s, *, dry_run=False):
        monkeypatch.setattr(oci.time, "time", lambda: at_s)
        policy = RetentionPolicy(0, 0, grace_hours=1)
        return collect(MODEL, catalogue, policy=policy, dry_run=dry_run).swept.parts

    assert sweep(now_s + 3000) == ()
    assert sweep(now_s + 4000, dry_run=True) == (part.digest,)
    put_part(backend, part_of(FILES), tmp_path / "files")
    assert sweep(now_s + 7000) == ()
    assert sweep(now_s + 8000) == (part.digest,)
    with pytest.raises(NotPublishedError):
        read_part(backend, part.digest, MODEL)


@pytest.mark.slow
def test_the_registrys_own_garbage_collection_spares_live_versions_and_frees_the_others(tmp_path):
    folder, runs = tmp_path / "server", tmp_path / "out"

    def bundle(number):
        made = (Made("cpu", HERE, os.urandom(1_000_000)), Made("portable"))
        changes = {"spec": bytes([number // 2]), "created_at": f"2026-11-2{number}T00:00:00+00:00"}
        return write_bundle(tmp_path / str(number), made=made, **changes)

    with oci_server(folder) as server, open_catalogue(oci_url(server.url)) as one:
        for number in range(4):
            publish_bundle(bundle(number), one)
        kept = one.read_state("net").latest()
        assert len(collect("net", one, policy=RetentionPolicy(1, 0, 0), dry_run=False).swept.parts) == 3
        repositories = one.backend.url.partition("/team")[2]
    for untagged in ((), ("-m",)):
        command = ("docker-registry", "garbage-collect", *untagged, str(folder / "config.yml"))
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        sizes = [path.stat().st_size for path in (folder / "data").rglob("data")]
        assert sum(size >= 1_000_000 for size in sizes) == 1
        with oci_server(folder) as server:
            url = f"oci+{server.url}/team{repositories}"
            with open_catalogue(url) as other:
                pull(PullRequest(VersionRef("net", kept.digest)), other, runs, hardware=BARE)
        assert read_tree(runs) == read_tree(tmp_path / "3")


def test_oras_pulls_a_part_byte_for_byte(backend, tmp_path):
    import oras.client

    publish(backend, tmp_path)
    host = backend.url.partition("://")[2].partition("/")[0]
    client = oras.client.OrasClient(hostname=host, insecure=True)
    target = f"{host}/{repository(backend)}@{part_of(FILES).digest}"
    client.pull(target=target, outdir=str(tmp_path / "oras"))
    pulled = {path: (tmp_path / "oras" / path).read_bytes() for path in FILES}
    assert pulled == FILES


def copy_version(backend, source, name, target):
    """Copies what a tag or digest names as crane and skopeo do: by the API, knowing nothing of us."""
    accept = {"Accept": f"{INDEX}, {MANIFEST}"}
    old, new = (api(backend, "").replace(repository(backend), one) for one in (source, target))
    document = requests.get(f"{old}manifests/{name}", headers=accept, timeout=300)
    for listed in document.json().get("manifests", []):
        copy_version(backend, source, listed["digest"], target)
    for blob in (*document.json().get("layers", []), *filter(None, [document.json().get("config")])):
        data = requests.get(f"{old}blobs/{blob['digest']}", timeout=300).content
        location = requests.post(f"{new}blobs/uploads/", timeout=300).headers["Location"]
        requests.put(f"{location}&digest={blob['digest']}", data=data, timeout=300).raise_for_status()
    kind = {"Content-Type": document.headers["Content-Type"]}
    requests.put(
        f"{new}manifests/{name}", data=document.content, headers=kind, timeout=300
    ).raise_for_status()


def test_a_version_that_was_copied_by_the_api_is_the_same(backend, tmp_path):
    version = publish(backend, tmp_path)
    source, target = repository(backend), repository(backend).replace(MODEL, "copied")
    copy_version(backend, source, "1.0", target)
    found = requests.get(api(backend, "manifests/1.0"), headers={"Accept": INDEX}, timeout=300)
    assert parse_version(found.content) == version
    assert read_part(backend, version.parts[0].digest, "copied") == part_of(FILES).data
    assert list_versions(backend, "copied") == [version.digest]


# Credentials


@contextmanager
def oci_login(folder, url, password=PASSWORD):
    """Makes a Docker configuration hold credentials for a registry, as `docker login` does."""
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    config = {"auths": {url.partition("://")[2]: {"auth": auth}}}
    write_files(folder / "docker", {"config.json": json.dumps(config).encode()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_CONFIG", str(folder / "docker"))
        yield


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    with (
        oci_server(tmp_path_factory.mktemp("locked"), auth=True) as running,
        fault_proxy(running.url) as proxy,
    ):
        yield proxy


def secrets_of(password):
    return [password, base64.b64encode(f"{USER}:{password}".encode()).decode()]


def test_credentials_may_be_kept_by_a_url_as_pull_secrets_of_kubernetes_are(tmp_path):
    with oci_login(tmp_path, "docker://https://ghcr.io/v2/"):
        assert read_credentials("ghcr.io") == secrets_of(PASSWORD)[1]
        assert read_credentials("other.example") == ""


def test_a_registry_that_wants_credentials_gets_those_of_docker_login(locked, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with oci_login(tmp_path, locked.url):
        backend = OciBackend(oci_url(locked.url))
        publish(backend, tmp_path)
        upload(backend, tmp_path, BIG)
        assert download(backend, BIG) == BIG
        assert len(list_versions(backend, MODEL)) == 1
        backend.close()
    assert "/v2/" in caplog.text
    assert not any(secret in caplog.text for secret in secrets_of(PASSWORD))
    assert "_state=" not in caplog.text


@pytest.mark.parametrize("config", ["helper", "store"])
def test_credentials_are_found_wherever_docker_keeps_them(locked, tmp_path, monkeypatch, config):
    host = locked.url.partition("://")[2]
    helper = tmp_path / "docker-credential-tests"
    answer = json.dumps({"ServerURL": host, "Username": USER, "Secret": PASSWORD})
    helper.write_text(f"#!/bin/sh\nread -r host; test \"$1 $host\" = 'get {host}' && echo '{answer}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    configs = {
        "helper": {"auths": {host: {}}, "credHelpers": {host: "tests"}, "credsStore": "missing"},
        "store": {"credsStore": "tests"},
    }
    (tmp_path / "config.json").write_text(json.dumps(configs[config]))
    backend = OciBackend(oci_url(locked.url))
    assert list_versions(backend, MODEL) == []
    helper.write_text("#!/bin/sh\necho hunter2-of-the-tests >&2; exit 1\n")
    with pytest.raises(AccessDeniedError, match="docker login"):
        list_versions(OciBackend(oci_url(locked.url)), MODEL)
    backend.close()


@pytest.mark.attack
@pytest.mark.parametrize("password", ["", "wrong-but-secret"])
def test_wrong_credentials_are_named_nowhere(locked, tmp_path, caplog, password):
    caplog.set_level(logging.DEBUG)
    url = locked.url if password else "http://another.example"
    with oci_login(tmp_path, url, password):
        backend = OciBackend(oci_url(locked.url))
        with pytest.raises(AccessDeniedError, match="docker login 127") as caught:
            list_versions(backend, MODEL)
        backend.close()
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert not any(secret in shown for secret in secrets_of(password) if password)


def test_a_token_is_asked_for_and_renewed_when_it_expires(backend, proxy, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    realm = f'Bearer realm="{proxy.url}/token",service="tests",scope="repository:x:pull"'
    refusals = [
        Fault("status", path="tags/list", status=401, headers={"WWW-Authenticate": realm}) for _ in range(2)
    ]
    tokens = [
        Fault("status", path="^/token", status=200, body=json.dumps({"token": one}).encode())
        for one in ("token-one", "token-two")
    ]
    with oci_login(tmp_path, proxy.url):
        proxy.faults += [refusals[0], tokens[0]]
        list_versions(backend, MODEL)
        proxy.faults += [refusals[1], tokens[1]]
        list_versions(backend, MODEL)
    sent = [
        (path.partition("?")[0].rpartition("/")[2], headers.get("Authorization", ""))
        for (_, path), headers in zip(proxy.requests, proxy.headers, strict=True)
    ]
    basic = "Basic " + secrets_of(PASSWORD)[1]
    assert sent == [
        ("list", ""),
        ("token", basic),
        ("list", "Bearer token-one"),
        ("list", "Bearer token-one"),
        ("token", basic),
        ("list", "Bearer token-two"),
    ]
    assert not any(secret in caplog.text for secret in (*secrets_of(PASSWORD), "token-one", "token-two"))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("status", path="^/token", status=200, body=b"[]"), AccessDeniedError),
        (Fault("status", path="^/token", status=200, body=b"<html>"), AccessDeniedError),
        (Fault("status", path="^/token", status=401), AccessDeniedError),
        (Fault("status", path="^/token", status=503, times=9), RegistryUnavailableError),
        (Fault("status", path="^/token", status=200, body=bytes(2**21)), RegistryError),
    ],
)
def test_a_token_server_that_fails_is_an_error(backend, proxy, tmp_path, fault, kind):
    realm = f'Bearer realm="{proxy.url}/token",service="tests"'
    proxy.faults += [
        Fault("status", path="tags/list", status=401, headers={"WWW-Authenticate": realm}, times=9),
        dataclasses.replace(fault),
    ]
    with oci_login(tmp_path, proxy.url), pytest.raises(RegistryError) as caught:
        list_versions(backend, MODEL)
    assert isinstance(caught.value, kind)


@pytest.mark.attack
def test_a_token_server_without_tls_gets_no_credentials(tmp_path, proxy):
    client = OciClient("registry.example", secure=True, timeout_s=(1, 1))
    url = f"{client.base}team/tags/list"
    challenge = f'Bearer realm="{proxy.url}/token",service="tests"'
    with oci_login(tmp_path, "https://registry.example"), responses.RequestsMock() as answers:
        answers.get(url, status=401, headers={"WWW-Authenticate": challenge})
        with pytest.raises(RegistryError, match="expected an https URL"):
            client.open("GET", url, "list versions")
    assert proxy.requests == []
    client.close()


def ask_for_token(host, realm, folder, *, login, token="one"):
    """Asks a registry that sends for a token to `realm`; returns the credentials that `realm` got."""
    client = OciClient(host, secure=True, timeout_s=(1, 1))
    url = f"{client.base}team/tags/list"
    challenge = {"WWW-Authenticate": f'Bearer realm="{realm}",service="tests"'}
    with oci_login(folder, f"https://{login}"), responses.RequestsMock(False) as answers:
        answers.get(url, status=401, headers=challenge)
        answers.get(realm, json={"token": token})
        answers.get(url, json={"tags": []})
        try:
            client.open("GET", url, "list versions").close()
        finally:
            asked = [call.request for call in answers.calls if str(call.request.url).startswith(realm)]
            client.close()
    return [one.headers.get("Authorization") for one in asked]


@pytest.mark.attack
@pytest.mark.parametrize("token", ["\u20ac", "a b", "a\r\nX-Own: 1", 7, ["a"]])
def test_a_token_that_no_header_carries_is_none(tmp_path, token):
    with pytest.raises(AccessDeniedError):
        ask_for_token("host.test", "https://host.test/token", tmp_path, login="host.test", token=token)


OWN = "Basic " + secrets_of(PASSWORD)[1]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("host", "realm", "login", "sent"),
    [
        ("registry.example.org", "https://evil.test/token", "", None),
        ("registry.example.org", "https://registry.example.org.evil.test/token", "", None),
        ("registry.example.org", "https://evilexample.org/token", "", None),
        ("example.org", "https://evil.org/token", "", None),
        ("10.0.0.1", "https://10.0.0.2/token", "", None),
        ("10.0.0.1:5000", "https://evil.0.0.1/token", "", None),
        ("[::1]:5000", "https://evil.test/token", "", None),
        ("localhost", "https://evil.localhost/token", "", None),
        ("localhost:5000", "https://localhost:5001/token", "", None),
        ("10.0.0.1:5000", "https://10.0.0.1/token", "", None),
        ("registry-1.example.org", "https://auth.example.org/token", "", [OWN]),
        ("registry.gitlab.com", "https://gitlab.com/jwt/auth", "", [OWN]),
        ("gitlab.example.org:5050", "https://gitlab.example.org/jwt/auth", "", [OWN]),
        ("quay.io", "https://quay.io/v2/auth", "", [OWN]),
        # Anonymous pulls from public registries work so.
        ("registry.example.org", "https://auth.test/token", "other.example.org", [None]),
    ],
)
def test_a_token_server_of_the_same_domain_gets_the_credentials_and_no_other(
    tmp_path, host, realm, login, sent
):
    refused = pytest.raises(AccessDeniedError, match="expected a token server that may have its credentials")
    with nullcontext() if sent else refused:
        assert ask_for_token(host, realm, tmp_path, login=login or host) == sent


@pytest.mark.attack
def test_uploads_elsewhere_get_no_credentials(locked, server, tmp_path):
    with fault_proxy(server.url) as elsewhere, oci_login(tmp_path, locked.url):
        backend = OciBackend(oci_url(locked.url))
        begun = requests.post(
            f"{elsewhere.url}/v2/{repository(backend)}/blobs/uploads/", timeout=300
        ).headers["Location"]
        locked.clear()
        locked.faults.append(Fault("pass", method="POST"))
        locked.faults.append(Fault("status", method="POST", status=202, headers={"Location": begun}))
        upload(backend, tmp_path, b"somewhere else")
        backend.close()
        assert "PUT" in {method for method, _ in elsewhere.requests}
        assert all("Authorization" not in headers for headers in elsewhere.headers)
    locked.clear()
