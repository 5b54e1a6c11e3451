"""A model of the Hub comes from one commit with all that belongs to it, and again when its branch moved."""

import logging
from contextlib import ExitStack
from pathlib import Path

import pytest

from ortprep.build.execution import build_tasks, run_task, why_stale
from ortprep.build.receipts import read_receipt
from ortprep.bundle.codec import decode
from ortprep.bundle.digest import DigestCache, digest_bytes
from ortprep.errors import MissingExtraError, PipelineError, SourceError
from ortprep.spec.models import ModelSpec
from ortprep.spec.urls import HubAddress, parse_hub_url
from ortprep.stages.core.contract import Plan
from ortprep.stages.core.results import FetchResult
from ortprep.stages.fetch import inspection
from ortprep.stages.fetch.sources import TIMEOUT_VARIABLE
from ortprep.stages.fetch.stage import FetchStage
from ortprep.versions import install_command
from tests import builders as models
from tests.fakes import send_whole
from tests.stages.fetch.fakes import TOKEN, run_here, serve_hub

pytest.importorskip("huggingface_hub")
STAGE = FetchStage()
MODEL = models.zero_inputs().SerializeToString()
OTHER = MODEL + b"\x12\x00"
"""The same model, by a producer with an empty name."""


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def hub(tmp_path, monkeypatch, stack):
    """A Hub that `stack.close()` takes off the network."""
    hub = stack.enter_context(serve_hub())
    monkeypatch.setattr(inspection, "run_child", run_here)
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return hub


def task_of(folder, url, **fields):
    spec = ModelSpec.model_validate({"name": "m", "source": {"url": url}, **fields})
    plan = Plan(spec.located_in(folder), ("cpu",))
    return build_tasks(plan, (STAGE,), folder / "artifacts")[0]


def run(task):
    run_task(task, cache=DigestCache(), say=lambda _: None)
    receipt = read_receipt(task.receipt)
    return decode(FetchResult, receipt.result)


def key_of(task):
    receipt = read_receipt(task.receipt)
    return dict(receipt.key["source"])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://o/r/m.onnx", HubAddress("o/r", "m.onnx")),
        ("hf://o/r@v1.0/onnx/m.onnx", HubAddress("o/r", "onnx/m.onnx", "v1.0")),
        ("hf://o/r@a%2Fbranch/m.onnx", HubAddress("o/r", "m.onnx", "a/branch")),
        ("hf://o/r@refs/pr/3/m.onnx", HubAddress("o/r", "m.onnx", "refs/pr/3")),
        ("hf://datasets/o/r/m.onnx", HubAddress("datasets/o/r", "m.onnx")),
    ],
)
def test_a_url_names_repository_revision_and_path(url, expected):
    address = parse_hub_url(url)
    assert address == expected
    assert parse_hub_url(str(address)) == expected


@pytest.mark.parametrize(
    "url",
    [
        "hf://m.onnx",
        "hf://o/r@a/m.onnx@b",
        "hf://o/r/../m.onnx",
        "hf://datasets/o/m.onnx",
        "hf://o/r/m.onnx@",
    ],
)
def test_what_names_no_file_of_the_hub_is_a_wrong_spec(url):
    with pytest.raises(ValueError, match="expected"):
        task_of(Path(), url)


def test_a_revision_is_pinned_to_its_commit(hub, tmp_path):
    repository = hub.add("o/r", {"onnx/m.onnx": MODEL})
    commit = repository.refs["v1"] = repository.refs["main"]
    repository.commit({})
    task = task_of(tmp_path, "hf://o/r@v1/onnx/m.onnx")
    result = run(task)
    source = key_of(task)
    assert (source["url"], source["commit"]) == ("hf://o/r@v1/onnx/m.onnx", commit)
    assert (task.folder / "m.onnx").read_bytes() == MODEL
    assert (result.model, result.source.sha256) == ("m.onnx", digest_bytes(MODEL))
    assert ("HEAD", f"/o/r/resolve/{commit}/onnx/m.onnx", None) in hub.requests
    again = task_of(tmp_path, f"hf://o/r@{commit}/onnx/m.onnx")
    run(again)
    hub.requests.clear()
    assert why_stale(again, DigestCache()) == ()
    assert hub.requests == [], "a commit means the same for ever"


def test_external_data_comes_along(hub, tmp_path):
    source = models.write_external_model(models.matmul_net(), tmp_path / "m.onnx", location="sub/w.bin")
    files = {"onnx/m.onnx": source.read_bytes(), "onnx/sub/w.bin": (tmp_path / "sub/w.bin").read_bytes()}
    hub.add("o/r", files)
    task = task_of(tmp_path, "hf://o/r/onnx/m.onnx", inputs={"x": {"shapes": [[1, 64]]}})
    result = run(task)
    assert {entry.path for entry in result.source.files} == {"m.onnx", "sub/w.bin"}
    assert (task.folder / "sub/w.bin").read_bytes() == files["onnx/sub/w.bin"]


def test_a_branch_that_moved_is_fetched_again(hub, tmp_path):
    repository = hub.add("o/r", {"m.onnx": MODEL})
    old = repository.refs["main"]
    task = task_of(tmp_path, "hf://o/r/m.onnx")
    first = run(task)
    assert why_stale(task, DigestCache()) == ()
    new = repository.commit({"m.onnx": MODEL, "README.md": b"# news"})
    assert why_stale(task, DigestCache()) == (f"source.commit: was {old}, is {new}",)
    assert run(task) == first, "the same model is the same outcome"
    repository.commit({"m.onnx": OTHER})
    assert run(task).source.sha256 == digest_bytes(OTHER)


def test_a_branch_that_moves_meanwhile_does_not_change_what_is_fetched(hub, tmp_path):
    repository = hub.add("o/r", {"m.onnx": MODEL})
    task = task_of(tmp_path, "hf://o/r/m.onnx")

    def move_branch(_):
        repository.commit({"m.onnx": OTHER})

    run_task(task, cache=DigestCache(), say=move_branch)
    assert (task.folder / "m.onnx").read_bytes() == MODEL


def test_without_a_network_a_commit_is_up_to_date_and_a_branch_says_why_not(hub, tmp_path, stack):
    commit = hub.add("o/r", {"m.onnx": MODEL}).refs["main"]
    task = task_of(tmp_path, f"hf://o/r@{commit}/m.onnx")
    run(task)
    stack.close()
    assert why_stale(task, DigestCache()) == ()
    with pytest.raises(SourceError, match="cannot reach the Hub: hf://o/r/m"):
        run(task_of(tmp_path / "other", "hf://o/r/m.onnx"))


@pytest.mark.attack
def test_an_answer_that_is_no_commit_is_refused(hub, tmp_path):
    repository = hub.add("o/r", {"m.onnx": MODEL})
    repository.commits["../x"] = {"m.onnx": MODEL}
    repository.refs["main"] = "../x"
    with pytest.raises(SourceError, match=r"expected a commit, got '\.\./x'"):
        run(task_of(tmp_path, "hf://o/r/m.onnx"))


@pytest.mark.attack
def test_a_file_that_is_said_to_be_on_this_machine_is_refused(hub, tmp_path):
    hub.add("o/r", {"m.onnx": MODEL})
    hub.store.url = "file:///etc/hostname?"
    with pytest.raises(SourceError, match=r"cannot (fetch|reach the Hub): hf://o/r"):
        run(task_of(tmp_path, "hf://o/r/m.onnx"))


@pytest.mark.attack
def test_a_file_is_no_larger_than_a_model_can_be_and_has_the_digest_that_the_hub_lists(
    hub, tmp_path, monkeypatch
):
    hub.add("o/r", {"m.onnx": MODEL})
    task = task_of(tmp_path, "hf://o/r/m.onnx")
    with monkeypatch.context() as patch:
        patch.setattr("ortprep.stages.fetch.stage.MAX_INLINE_BYTES", len(MODEL) - 1)
        with pytest.raises(SourceError, match=f"too large: .*\n.* at most {len(MODEL) - 1} bytes, got"):
            run(task)
    assert hub.store.requests == []
    with monkeypatch.context() as patch:
        patch.setattr("ortprep.stages.fetch.stage.MAX_INLINE_BYTES", 2**20)
        hub.store.script = [lambda handler, server, _: send_whole(handler, server, bytes(2**22))] * 9
        with pytest.raises(SourceError, match="too large: hf://o/r"):
            run(task)
    hub.store.script = [lambda handler, server, content: send_whole(handler, server, bytes(len(content)))]
    with pytest.raises(SourceError, match="other bytes than the Hub says: hf://o/r"):
        run(task)


@pytest.mark.attack
def test_a_download_is_limited_in_time_by_the_environment(hub, tmp_path, monkeypatch):
    hub.add("o/r", {"m.onnx": MODEL})
    for value, message in (
        ("0", "took too long: hf://o/r/m.onnx"),
        ("soon", f"bad {TIMEOUT_VARIABLE}: 'soon'"),
    ):
        monkeypatch.setenv(TIMEOUT_VARIABLE, value)
        with pytest.raises(SourceError, match=message):
            run(task_of(tmp_path, "hf://o/r/m.onnx"))


@pytest.mark.attack
@pytest.mark.parametrize("place", ["variable", "file"])
def test_the_token_of_the_login_goes_to_the_hub_alone(hub, tmp_path, monkeypatch, caplog, place):
    caplog.set_level(logging.DEBUG)
    hub.add("o/r", {"m.onnx": MODEL}, private=True)
    if place == "variable":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    else:
        (tmp_path / "token").write_text(TOKEN)
    task = task_of(tmp_path, "hf://o/r/m.onnx")
    run(task)
    assert {token for _, _, token in hub.requests} == {TOKEN}
    assert [headers for _, headers in hub.store.requests if "Authorization" in headers] == []
    written = caplog.text + task.receipt.read_text()
    assert TOKEN not in written
    assert "Signature=secret" not in written


@pytest.mark.parametrize(
    ("url", "options", "message", "hint"),
    [
        ("hf://o/absent/m.onnx", {}, "no such repository, or no access to it: o/absent", "hf auth login"),
        ("hf://o/r/m.onnx", {"private": True}, "no such repository, or no access to it: o/r", "HF_TOKEN"),
        ("hf://o/r/m.onnx", {"gated": True}, "no access to a gated repository: o/r", "accept the terms"),
        ("hf://o/r@v9/m.onnx", {}, "no such revision: v9 of o/r", None),
        ("hf://o/r/absent.onnx", {}, "no such file on the Hub: hf://o/r", None),
        ("hf://o/r/folder", {}, "no such file on the Hub: hf://o/r", None),
    ],
)
def test_what_cannot_be_had_is_told_at_once_and_by_name(hub, tmp_path, url, options, message, hint):
    hub.add("o/r", {"m.onnx": MODEL, "folder/m.onnx": MODEL}, **options)
    with pytest.raises(SourceError) as caught:
        run(task_of(tmp_path, url))
    assert message in caught.value.message
    assert (hint or "") in (caught.value.hint or "")


def test_without_the_client_its_extra_is_named(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError) as caught:
        run(task_of(tmp_path, "hf://o/r/m.onnx"))
    assert isinstance(caught.value, PipelineError)
    assert caught.value.hint == install_command("hub")
