"""What the terminal shows: tables, logs, progress, and no control characters of others."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.build.observers import BuildEvent
from ortprep.bundle.digest import digest_json
from ortprep.cli.console import echo, start_logging, write_json, write_line, write_table
from ortprep.cli.progress import BuildObserver
from ortprep.quoting import printable
from ortprep.tables import Table
from tests.builders import two_inputs, write_model
from tests.prepare.builders import REPOSITORY, Project
from tests.registry.builders import write_bundle, write_keys
from tests.runtime.builders import rewrite_digests

texts = st.text(st.characters(categories=["Ll", "Lu", "Nd"]), min_size=1, max_size=60)


@given(st.lists(st.tuples(*[texts] * 6), min_size=1, max_size=4))
def test_a_table_in_a_pipe_has_every_character_in_lines_of_a_hundred(rows):
    with pytest.MonkeyPatch.context() as patch:
        written = []
        patch.setattr("sys.stdout.write", written.append)
        write_table(Table("title", ("name", *"abcde"), tuple(rows)))
    lines = "".join(written).splitlines()
    assert max(map(len, lines)) <= 100
    assert sorted("".join(lines[4:]).replace(" ", "")) == sorted("".join("".join(row) for row in rows))


@pytest.mark.attack
def test_no_other_packages_debug_log_reaches_the_terminal(monkeypatch):
    """httpx and botocore log signed addresses, cookies and session tokens there."""
    own = logging.getLogger("ortprep")
    levels = logging.root.level, own.level
    monkeypatch.setattr(logging.root, "handlers", [])
    try:
        start_logging("debug")
        assert own.getEffectiveLevel() == logging.DEBUG
        assert logging.getLogger("botocore").getEffectiveLevel() == logging.WARNING
    finally:
        logging.root.setLevel(levels[0])
        own.setLevel(levels[1])


# -- what others wrote into a bundle is shown as it is, and gives no terminal an order


ORDERS = "\x1b]8;;http://evil\x07\x1b[2J\x9b31m\u202e\u2066\u200f\u2028\x85\x7f\r\b"
"""A link, a cleared screen, C1, bidirectional overrides, line ends, and what moves the cursor."""
FORGED = "\nenv: PROBLEM: forged"
MARKUP = "[red][link=http://evil]x[/link]:smile:"
HOSTILE = MARKUP + ORDERS + FORGED
KEPT = {"schema_version", "sha256", "path", "digest", "self_digest", "spec_digest", "dtype"}
"""Fields whose form readers check."""
TENSORS = ("inputs", "outputs")


def _made_hostile(data, field=""):
    if isinstance(data, dict):
        return {name: _made_hostile(value, name) for name, value in data.items()}
    if isinstance(data, list):
        return [_made_hostile(item, field) for item in data]
    return data if field in KEPT or not isinstance(data, str) else f"{data}{HOSTILE}"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """`conv` is real; texts of a manifest, names of tensors and a node's name of others are hostile."""
    project = Project(tmp_path_factory.mktemp("hostile"))
    for name in ("conv", "hostile", "renamed"):
        shutil.copytree(REPOSITORY / "tests/compat/0.1.0/conv", project.artifacts / name)
    _rewrite(project.artifacts / "hostile/manifest.json", _made_hostile, environment={HOSTILE: HOSTILE})
    loader = project.artifacts / "renamed/loader.json"
    _rewrite(loader, dict, **{part: _made_hostile(json.loads(loader.read_text())[part]) for part in TENSORS})
    rewrite_digests(loader.parent)
    model = two_inputs()
    model.graph.node[0].name = HOSTILE
    write_model(model, project.root / "hostile.onnx")
    return project


def _rewrite(path, change, **parts):
    data = change(json.loads(path.read_text())) | parts
    data.pop("self_digest")
    path.write_text(json.dumps(data | {"self_digest": digest_json(data)}))


COMMANDS = {
    "show": (0, ("show", "hostile")),
    "show --json": (0, ("show", "hostile", "--json")),
    "compare": (1, ("compare", "conv", "hostile")),
    "compare --json": (1, ("compare", "conv", "hostile", "--json")),
    "show --all": (0, ("show", "hostile", "--all")),
    "check": (0, ("check", "artifacts/hostile")),
    "place": (0, ("place", "hostile", "--devices", "cpu")),
    "check tensors": (0, ("check", "artifacts/renamed")),
    "doctor": (0, ("doctor", "init", "hostile.onnx", "--rounds", "1")),
}


@pytest.mark.attack
@pytest.mark.parametrize(("code", "arguments"), COMMANDS.values(), ids=COMMANDS)
def test_a_hostile_bundle_writes_no_order_through_any_command(project, code, arguments):
    ended = project.call(*arguments)
    assert (ended.code, "Traceback" in ended.err) == (code, False), ended.err
    assert _orders(ended.out + ended.err) == []
    # The long title of a table is wrapped, wherever that is.
    assert FORGED not in ended.out + ended.err or arguments[0] == "show"


@pytest.mark.attack
def test_markup_of_a_bundle_is_text(project):
    assert MARKUP in project.call("show", "hostile").out


@pytest.mark.attack
def test_json_keeps_every_character(project):
    shown = json.loads(project.call("show", "hostile", "--json").out)
    assert shown["environment"][HOSTILE] == HOSTILE


@pytest.mark.attack
@pytest.mark.parametrize("command", ["show", "compare"])
def test_on_a_terminal_there_are_colours_of_ours_and_nothing_else(project, command):
    _, arguments = COMMANDS[command]
    _, written = project.on_terminal("-m", "ortprep", *arguments)
    assert _orders(re.sub(r"\x1b\[[0-9;]*m|\r\n", "\n", written)) == []
    assert "\x1b[31m" not in written, "no red was asked for but by the bundle"


@pytest.mark.attack
@pytest.mark.slow
def test_a_hostile_receipt_of_a_pulled_bundle_writes_no_order(project, tmp_path):
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
        ended = project.call("verify", str(pulled), "--key", str(public))
        assert "Traceback" not in ended.err
        assert _orders(ended.out + ended.err) == []


@pytest.mark.attack
def test_every_way_to_a_terminal_takes_orders_out(capsys):
    observer = BuildObserver()
    observer(BuildEvent("started", HOSTILE))
    observer(BuildEvent("said", HOSTILE, HOSTILE))
    observer(BuildEvent("failed", HOSTILE, HOSTILE))
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


def test_a_file_that_gets_both_streams_has_them_in_order(tmp_path):
    program = "from ortprep.cli.console import echo, write_line; write_line('a'); echo('b'); write_line('c')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", program], stdout=log, stderr=log, env=environment, check=True)
    assert (tmp_path / "log").read_text() == "a\nb\nc\n"


@pytest.mark.attack
def test_text_that_is_none_of_it_stays_as_it_is():
    text = "größe × ± → 模型 naïve\n\tnext line"
    assert printable(text) == text
    assert printable("two\nlines", lines=False) == "two lines"


def _orders(text):
    return sorted({one for one in text if one != "\n" and not one.isprintable()})
