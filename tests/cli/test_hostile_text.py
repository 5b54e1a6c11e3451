"""What others wrote into a bundle is shown as it is, and gives no terminal an order."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortprep.bundle.digest import digest_json
from ortprep.cli.console import BuildObserver, echo, start_logging, write_json, write_line
from ortprep.quoting import printable
from tests.prepare.builders import REPOSITORY, Project
from tests.registry.builders import write_bundle, write_keys
from tests.runtime.builders import rewrite_digests

pytestmark = pytest.mark.attack

ORDERS = "\x1b]8;;http://evil\x07\x1b[2J\x9b31m\u202e\u2066\u200f\u2028\x85\x7f\r\b"
"""A link, a cleared screen, C1, bidirectional overrides, line ends, and what moves the cursor."""
MARKUP = "[red][link=http://evil]x[/link]:smile:"
HOSTILE = MARKUP + ORDERS
KEPT = {"schema_version", "sha256", "path", "digest", "self_digest", "spec_digest", "dtype"}
"""Fields whose form readers check."""
TENSORS = ("inputs", "outputs")


def _made_hostile(data: Any, field: str = "") -> Any:
    if isinstance(data, dict):
        return {name: _made_hostile(value, name) for name, value in data.items()}
    if isinstance(data, list):
        return [_made_hostile(item, field) for item in data]
    return data if field in KEPT or not isinstance(data, str) else f"{data}{HOSTILE}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """`conv` is a real bundle; every text of one's manifest is hostile, every tensor's name of another."""
    project = Project(tmp_path_factory.mktemp("hostile"))
    for name in ("conv", "hostile", "renamed"):
        shutil.copytree(REPOSITORY / "tests/compat/0.1.0/conv", project.artifacts / name)
    _rewrite(project.artifacts / "hostile/manifest.json", _made_hostile, environment={HOSTILE: HOSTILE})
    loader = project.artifacts / "renamed/loader.json"
    _rewrite(loader, dict, **{part: _made_hostile(json.loads(loader.read_text())[part]) for part in TENSORS})
    rewrite_digests(loader.parent)
    return project


def _rewrite(path: Path, change: Callable[[Any], dict[str, Any]], **parts: Any) -> None:
    data = change(json.loads(path.read_text())) | parts
    data.pop("self_digest")
    path.write_text(json.dumps(data | {"self_digest": digest_json(data)}))


COMMANDS = {
    "show": (0, ("show", "hostile")),
    "show --json": (0, ("show", "hostile", "--json")),
    "compare": (1, ("compare", "conv", "hostile", "--across-hardware")),
    "compare --json": (1, ("compare", "conv", "hostile", "--across-hardware", "--json")),
    "report": (0, ("report", "hostile", "--out", "report.html")),
    "check": (0, ("check", "artifacts/hostile")),
    "place": (0, ("place", "hostile", "--devices", "cpu")),
    "serve-check": (1, ("serve-check", "renamed", "--devices", "cpu", "--requests", "1")),
}


@pytest.mark.parametrize(("code", "arguments"), COMMANDS.values(), ids=COMMANDS)
def test_a_hostile_bundle_writes_no_order_through_any_command(
    project: Project, code: int, arguments: tuple[str, ...]
) -> None:
    ended = project.run(*arguments)
    assert (ended.code, "Traceback" in ended.err) == (code, False), ended.err
    assert _orders(ended.out + ended.err) == []


def test_markup_of_a_bundle_is_text(project: Project) -> None:
    assert MARKUP in project.run("show", "hostile").out


def test_json_keeps_every_character(project: Project) -> None:
    shown = json.loads(project.run("show", "hostile", "--json").out)
    assert shown["environment"][HOSTILE] == HOSTILE


@pytest.mark.parametrize("command", ["show", "compare"])
def test_on_a_terminal_there_are_colours_of_ours_and_nothing_else(project: Project, command: str) -> None:
    _, arguments = COMMANDS[command]
    _, written = project.on_terminal("-m", "ortprep", *arguments)
    assert _orders(re.sub(r"\x1b\[[0-9;]*m|\r\n", "\n", written)) == []
    assert "\x1b[31m" not in written, "no red was asked for but by the bundle"


@pytest.mark.slow
def test_a_hostile_receipt_of_a_pulled_bundle_writes_no_order(project: Project, tmp_path: Path) -> None:
    write_bundle(project.artifacts / "net")
    private, public = write_keys(tmp_path / "keys")
    registry = ("--registry", str(tmp_path / "registry"))
    assert project.call("publish", "net", *registry, "--sign", str(private)).code == 0
    for position, field in enumerate(("version", "reference", "registry", "part")):
        pulled = tmp_path / f"pulled{position}"
        assert project.call("pull", "net", *registry, "--out", str(pulled)).code == 0
        receipt = pulled / ".registry/pulled.json"
        data = json.loads(receipt.read_text())
        receipt.write_text(json.dumps({**data, field: _made_hostile(data[field])}))
        ended = project.run("verify", str(pulled), "--key", str(public))
        assert "Traceback" not in ended.err
        assert _orders(ended.out + ended.err) == []


def test_every_way_to_a_terminal_takes_orders_out(capsys: pytest.CaptureFixture[str]) -> None:
    observer = BuildObserver()
    observer.started(HOSTILE)
    observer.said(HOSTILE, HOSTILE)
    observer.failed(HOSTILE, HOSTILE)
    write_line(HOSTILE)
    write_json({HOSTILE: HOSTILE})
    echo(HOSTILE)
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        start_logging("warning")
        logging.getLogger("ortprep").warning("%s", HOSTILE)
    finally:
        root.handlers = before
    written = capsys.readouterr()
    assert written.out.count(MARKUP) == 3
    assert written.err.count(MARKUP) == 6
    assert _orders(written.out + written.err) == []


def test_text_that_is_none_of_it_stays_as_it_is() -> None:
    text = "größe × ± → 模型 naïve\n\tnext line"
    assert printable(text) == text
    assert printable("two\nlines", lines=False) == "two lines"


def _orders(text: str) -> list[str]:
    return sorted({one for one in text if one != "\n" and not one.isprintable()})
