"""Laws of URLs as they may be shown."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ortprep.spec.redaction import REDACTED, has_credentials, redact_url

_SECRET = st.text(st.characters(codec="ascii", categories=["Lu", "Ll", "Nd"]), min_size=8, max_size=40)
_SECRET_PARAMETERS = [
    "X-Amz-Signature",
    "X-Amz-Credential",
    "x-amz-security-token",
    "X-Goog-Signature",
    "Signature",
    "AWSAccessKeyId",
    "Key-Pair-Id",
    "Policy",
    "sig",
    "access_token",
    "private-token",
    "api_key",
    "apikey",
    "key",
    "password",
    "client_secret",
    "%73ig",
]


@pytest.mark.parametrize(
    "url",
    [
        "https://host/models/resnet50.onnx",
        "https://host:8443/a/b.onnx?download=true&versionId=3#weights",
        "s3://bucket/key.onnx",
        "http://[::1]:80/x.onnx",
        "file:///models/x.onnx",
        "https://host/@scope/model@v1/x.onnx",
        "simplecache::zip://x.onnx::https://host/x.zip",
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
        ("zip://x.onnx::https://u:p@host/x.zip", "zip://x.onnx::https://REDACTED@host/x.zip"),
        ("HTTPS://u@[::1]/x", "HTTPS://REDACTED@[::1]/x"),
    ],
)
def test_user_and_password_are_never_shown(url, shown):
    assert redact_url(url) == shown
    assert has_credentials(url)


def test_a_user_without_password_is_no_secret_where_no_token_can_be_one():
    assert not has_credentials("ssh://git@host/x")


@pytest.mark.attack
@given(_SECRET, st.sampled_from(_SECRET_PARAMETERS), st.sampled_from("?#"))
def test_a_secret_parameter_is_never_shown(secret, name, border):
    url = f"https://host/x{border}a=1&{name}={secret}&b=2"
    assert redact_url(url) == f"https://host/x{border}a=1&{name}={REDACTED}&b=2"


def test_two_signatures_of_one_object_read_the_same():
    first, second = (
        f"https://b.s3.amazonaws.com/x?X-Amz-Date={day}&X-Amz-Signature={sign}&versionId=7"
        for day, sign in [("20260101T000000Z", "aa11"), ("20260102T000000Z", "bb22")]
    )
    assert redact_url(first) == redact_url(second)


def test_all_of_a_shared_access_signature_is_redacted_and_only_there():
    assert redact_url("https://h/x?sv=1&se=2&sig=3&id=4").endswith(
        "?sv=REDACTED&se=REDACTED&sig=REDACTED&id=4"
    )
    assert redact_url("https://h/x?sv=1&se=2") == "https://h/x?sv=1&se=2"


def test_a_random_looking_value_is_not_shown_but_still_told_apart():
    first, second = (f"https://host/x?id=1aB3{letter * 24}" for letter in "xy")
    assert redact_url(first) != redact_url(second)
    assert "xxxx" not in redact_url(first)


@given(
    st.text()
    | st.from_regex(r"[a-z]{1,5}:/{0,3}[ab:@/?#&;=%\[\]0-9]{0,40}(::[a-z:/@]{0,9})?", fullmatch=True)
)
def test_redaction_is_total_and_redacting_twice_changes_nothing(text):
    once = redact_url(text)
    assert redact_url(once) == once


@pytest.mark.attack
@given(_SECRET, st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=10))
def test_no_password_survives_whatever_stands_in_it(secret, rest):
    assume("::" not in rest and secret not in REDACTED)
    assert secret not in redact_url(f"https://user:x{secret}{rest}@host/x")
