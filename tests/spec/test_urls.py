"""Laws of URLs as they may be shown."""

import json

import fsspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from ortprep.errors import RegistryError
from ortprep.registry.references import open_registry
from ortprep.spec.models import SourceSpec
from ortprep.spec.urls import REDACTED, STORES, check_url, has_credentials, redact_url
from ortprep.transport.fsspec_folder import FsspecFolder
from tests.fakes import serve

_SECRET = st.text(st.characters(codec="ascii", categories=["Lu", "Ll", "Nd"]), min_size=8, max_size=40)


@pytest.mark.parametrize(
    "url",
    [
        "https://host/models/resnet50.onnx",
        "https://host:8443/a/b.onnx",
        "s3://bucket/key.onnx",
        "http://[::1]:80/x.onnx",
        "file:///models/x.onnx",
        "https://host/@scope/model@v1/x.onnx",
        "models/x.onnx",
        "",
    ],
)
def test_a_url_without_secrets_is_shown_as_it_is(url):
    assert redact_url(url) == url
    assert not has_credentials(url)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pw@host/x", "https://REDACTED@host/x"),
        ("https://hf_token@host/x", "https://REDACTED@host/x"),
        ("https://user:p/w@host/x", "https://REDACTED@host/x"),
        ("https://user:p?w#@host/x", "https://REDACTED@host/x"),
        ("sftp://user:pw@host/x", "sftp://REDACTED@host/x"),
        ("zip://x.onnx::https://u:p@host/x.zip", "zip://REDACTED@host/x.zip"),
        ("HTTPS://u@[::1]/x", "HTTPS://REDACTED@[::1]/x"),
    ],
)
def test_user_and_password_are_never_shown(url, shown):
    assert redact_url(url) == shown
    assert has_credentials(url)


def test_a_user_without_password_is_no_secret_where_no_token_can_be_one():
    assert not has_credentials("ssh://git@host/x")


@pytest.mark.attack
@given(_SECRET, st.sampled_from(["token=", "sig=", "x-amz-signature=", "b&c#", ""]), st.sampled_from("?#"))
def test_no_parameter_is_shown(secret, name, border):
    assert redact_url(f"https://host/x{border}{name}{secret}&b=2") == f"https://host/x{border}{REDACTED}"


@given(
    st.text()
    | st.from_regex(r"[a-z]{1,5}:/{0,3}[ab:@/?#&;=%\[\]0-9]{0,40}(::[a-z:/@]{0,9})?", fullmatch=True)
)
@example("::A::@")
def test_redaction_is_total_and_redacting_twice_changes_nothing(text):
    once = redact_url(text)
    assert redact_url(once) == once


@pytest.mark.attack
@given(_SECRET, st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=10))
def test_no_password_survives_whatever_stands_in_it(secret, rest):
    assume("::" not in rest and secret not in REDACTED)
    assert secret not in redact_url(f"https://user:x{secret}{rest}@host/x")


# -- schemes of URLs: plain files and objects are taken, and nothing that wraps, chains or runs


@pytest.fixture
def reference(tmp_path):
    """The URL of a file that another file makes up; before fsspec 2026.6 that one's `gen` ran code."""
    template = {"key": "{{ 'made' + '.onnx' }}", "url": "x", "dimensions": {"i": [0]}}
    index = {"version": 1, "gen": [template], "refs": {"model.onnx": "base64:QUJD"}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    url = f"reference://model.onnx::file://{tmp_path}/index.json"
    with fsspec.open(url) as file:
        assert file.read() == b"ABC", "fsspec has to take it, or this proves nothing"
    return url


@pytest.mark.attack
def test_a_chained_url_reaches_no_filesystem(reference):
    with pytest.raises(ValidationError, match=r"expected hf://"):
        SourceSpec.model_validate({"url": reference})
    with pytest.raises(RegistryError, match=r"not a registry: reference://REDACTED\n.*s3://"):
        open_registry(reference)


@pytest.mark.attack
def test_a_web_server_is_no_registry():
    """fsspec would unpack its answers, and follow its listings for ever."""
    with serve() as server:
        for url in (server.url, server.url.replace("http", "HTTP"), "https://127.0.0.1:9/"):
            with pytest.raises(RegistryError, match=r"not a registry(.|\n)*web server") as raised:
                open_registry(url).list_models()
            assert "https://" not in str(raised.value).partition("\n")[2]
        assert server.requests == []


@pytest.mark.attack
@pytest.mark.parametrize(
    "url",
    [
        "reference://m.onnx",
        "filecache://host/m.onnx",
        "simplecache::https://host/m.onnx",
        "zip://m.onnx::https://host/x.zip",
        "s3://bucket/x::file:///etc/passwd",
        "https://host/x::reference://m",
        "file::reference://m",
        "ssh://host/m.onnx",
        "sftp://host/m.onnx",
        "github://org:repo@main/m.onnx",
        "data://text/plain,x",
        "local:///m.onnx",
        "https://host/m.onnx",
        "reference::file:///index.json",
        "/models/m.onnx",
        "",
    ],
)
def test_a_scheme_that_is_not_listed_is_refused_with_those_that_are(url):
    with pytest.raises(ValueError, match="expected a URL that begins with one of") as raised:
        check_url(url)
    assert all(f"{scheme}://" in str(raised.value) for scheme in STORES)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/m.onnx",
        "gs://bucket/m.onnx",
        "az://container/m.onnx",
        "abfss://container@account.dfs.core.windows.net/m.onnx",
        "hf://org/repo@main/m.onnx",
        "file:///models",
    ],
)
def test_plain_files_and_objects_are_allowed(url):
    check_url(url)


def test_a_folder_may_be_called_as_it_likes(tmp_path):
    FsspecFolder(f"{tmp_path}/reference::file:/x").write("net/file", b"")
    assert (tmp_path / "reference::file:/x/net/file").is_file()


@pytest.mark.attack
def test_a_url_of_many_parameters_is_redacted_in_linear_time():
    query = "a=1&" * 16_000  # a quadratic search takes a minute
    assert redact_url(f"https://h/m.onnx?{query}token=secret") == f"https://h/m.onnx?{REDACTED}"


@pytest.mark.attack
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h/?" + "&" * 10**7, REDACTED),
        ("x:y@@" + "s3:::" * 1500 + "@", f"x:{REDACTED}@"),
        ("zip://a::zip://b::https://h/?key=secret", f"zip://{REDACTED}"),
    ],
)
def test_a_url_that_is_too_long_or_chained_is_not_shown(url, shown):
    assert redact_url(url) == redact_url(redact_url(url)) == shown
