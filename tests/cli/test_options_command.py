"""`ortprep options` tells all that is known of every option, for people and for programs."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ortprep.bundle.codec import encode
from ortprep.cli import options_table
from ortprep.cli.options_table import PROVIDERS, Listing, build_options_tables, list_options
from ortprep.options import (
    CUDA,
    NEWEST,
    OLDEST,
    Option,
    known_attributes,
    known_provider_options,
    known_session_config,
)
from ortprep.options.option import version_parts
from ortprep.versions import installed_onnxruntime
from tests.prepare.builders import Project

KNOWN: Mapping[str, Callable[[str], tuple[Option, ...]]] = {
    "session_config": known_session_config,
    "attributes": known_attributes,
    "cuda": lambda version: known_provider_options(CUDA, version),
}
ASKED = {
    None: ["session_config", "attributes", "cuda"],
    "session": ["session_config", "attributes"],
    "cuda": ["cuda"],
    "cpu": [],
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A folder to run the command in; it reads nothing there."""
    return Project(tmp_path)


def listed(project: Project, *arguments: str) -> list[dict[str, Any]]:
    outcome = project.call("options", "--json", *arguments)
    assert outcome.code == 0, outcome.err
    options: list[dict[str, Any]] = json.loads(outcome.out)["options"]
    return options


def draw(listing: Listing, *, width: int) -> str:
    """Returns the tables as a terminal of that width shows them, without colours."""
    console = Console(file=io.StringIO(), width=width)
    for table in build_options_tables(listing):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("version", [OLDEST, "1.26", NEWEST])
@pytest.mark.parametrize("provider", [None, *PROVIDERS])
def test_all_that_is_known_of_a_version_is_listed_once(
    project: Project, provider: str | None, version: str
) -> None:
    arguments = [] if provider is None else ["--provider", provider]
    found = listed(project, "--onnxruntime", version, *arguments)
    assert found == [
        {"section": section, **encode(option), "expected": option.expected}
        for section in ASKED[provider]
        for option in KNOWN[section](version)
    ]


def test_a_version_has_no_option_that_came_later(project: Project) -> None:
    assert {option["since"] for option in listed(project, "--onnxruntime", "1.25.1")} > {OLDEST, "1.24"}
    for option in listed(project, "--onnxruntime", "1.25.1"):
        assert version_parts(option["since"]) <= (1, 25, 1)


def test_without_a_version_it_is_the_installed_one_and_that_is_not_imported(project: Project) -> None:
    code = "import sys; from ortprep.cli.app import run; run(); sys.exit('onnxruntime' in sys.modules)"
    outcome = project.python("-c", code, "options", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out)["onnxruntime"] == installed_onnxruntime()


def test_where_none_is_installed_the_newest_is_listed_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options_table, "installed_onnxruntime", lambda: None)
    listing = list_options()
    assert listing.version == NEWEST
    assert listing.remarks == (f"ONNX Runtime is not installed; these are the options of {NEWEST}",)


@pytest.mark.parametrize("part", ["spin", "SPIN", "memory", "use_tf32"])
def test_a_part_of_a_name_finds_every_name_it_is_in(project: Project, part: str) -> None:
    every = listed(project)
    found = listed(project, part)
    assert found == [option for option in every if part.lower() in option["name"].lower()]
    assert 0 < len(found) < len(every)


# What people see


def test_a_terminal_of_100_columns_shows_every_name_in_one_piece_and_cuts_nothing() -> None:
    listing = list_options(version=NEWEST)
    shown = draw(listing, width=100)
    lines = shown.splitlines()
    starts = [line.split()[0] for line in lines if line.strip()]
    assert max(map(len, lines)) <= 100
    for section in listing.sections:
        for option in section.options:
            assert option.name in starts
    assert "…" not in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_any_width_is_kept(width: int) -> None:
    assert max(map(len, draw(list_options(version=NEWEST), width=width).splitlines())) <= width


def test_every_option_shows_its_values_default_effect_and_why_it_is_not_to_be_set() -> None:
    for section in list_options(version=NEWEST).sections:
        for option in section.options:
            one = Listing(NEWEST, (replace(section, options=(option,)),), ())
            left, right = columns_of(draw(one, width=100))
            owner = f"Not to be set: {option.owner}." if option.owner is not None else ""
            assert left == without_blanks(option.name + option.effect + owner)
            before = " or before" if option.since == OLDEST else ""
            values = f"{option.expected} default {option.default} since {option.since}{before} [1]"
            assert right == without_blanks(values)


def columns_of(shown: str) -> tuple[str, str]:
    """Returns the texts of the two columns of a table with one row, without blanks."""
    header, _, *lines = shown.partition("sources of names")[0].splitlines()[2:]
    middle = header.index("values")
    return without_blanks(line[:middle] for line in lines), without_blanks(line[middle:] for line in lines)


def without_blanks(text: Iterable[str]) -> str:
    return "".join("".join(text).split())


def test_every_source_that_is_referred_to_is_listed_once_at_the_end() -> None:
    options, _, sources = draw(list_options(version=NEWEST), width=100).partition("sources of names")
    listed_numbers = re.findall(r"\[(\d+)\]", sources)
    assert sorted(set(re.findall(r"\[(\d+)\]", options))) == listed_numbers


def test_in_a_pipe_it_is_plain_text_and_nothing_is_said(project: Project) -> None:
    outcome = project.call("options", "--onnxruntime", NEWEST, "--provider", "cuda")
    assert (outcome.code, outcome.err) == (0, "")
    assert not re.search(r"[\t\x1b]", outcome.out)
    assert "cudnn_conv_algo_search" in outcome.out


# What is wrong, or not there

WRONG = {
    "an unknown provider": (("--provider", "tensorrt"), "unknown provider: 'tensorrt'", "ortprep options"),
    "a misspelt provider": (
        ("--provider", "CUDAExecutionProvider"),
        "expected one of session, cuda, cpu",
        "ortprep options --provider cuda",
    ),
    "no version": (
        ("--onnxruntime", "latest"),
        "not a version of ONNX Runtime: 'latest'",
        f"ortprep options --onnxruntime {NEWEST}",
    ),
    "an empty version": (("--onnxruntime", ""), "not a version", f"--onnxruntime {NEWEST}"),
}


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize(("arguments", "message", "hint"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_use_is_told_in_the_form_of_all_errors(
    project: Project, arguments: tuple[str, ...], message: str, hint: str, form: tuple[str, ...]
) -> None:
    outcome = project.call("options", *arguments, *form)
    assert (outcome.code, outcome.out) == (2, "")
    assert re.fullmatch(r"error: .+\n(  .+\n)+\nhint: .+\n", outcome.err)
    assert message in outcome.err
    assert outcome.err.endswith(f"{hint}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("prepaking",), "no option that was asked for has 'prepaking' in its name\n"),
        (("--provider", "cpu"), "ONNX Runtime knows no options of provider cpu\n"),
    ],
)
def test_nothing_found_is_empty_data_and_said(
    project: Project, arguments: tuple[str, ...], said: str
) -> None:
    version = ("--onnxruntime", NEWEST)
    table = project.call("options", *version, *arguments)
    assert (table.code, table.out, table.err) == (0, "", said)
    assert json.loads(project.call("options", "--json", *version, *arguments).out)["options"] == []


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.20", f"the first ONNX Runtime that is listed is {OLDEST}; these are its options\n"),
        ("1.99.1", f"the last ONNX Runtime that is listed is {NEWEST}; 1.99.1 may have more\n"),
        (NEWEST, ""),
        (OLDEST, ""),
    ],
)
def test_a_version_beyond_the_table_is_said_to_be(project: Project, version: str, said: str) -> None:
    outcome = project.call("options", "--json", "--onnxruntime", version)
    assert (outcome.code, outcome.err) == (0, said)
    assert json.loads(outcome.out)["onnxruntime"] == version
