"""`ortprep options` tells all that is known of every option, for people and for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ortprep.bundle.codec import encode
from ortprep.options import (
    CUDA,
    NEWEST,
    OLDEST,
    Option,
    known_attributes,
    known_provider_options,
    known_session_config,
)
from ortprep.versions import installed_onnxruntime
from tests.prepare.builders import Project

KNOWN: Mapping[str, Callable[[str], tuple[Option, ...]]] = {
    "session_config": known_session_config,
    "attributes": known_attributes,
    "cuda": lambda version: known_provider_options(CUDA, version),
}


@pytest.fixture
def project(tmp_path):
    """A folder to run the command in; it reads nothing there."""
    return Project(tmp_path)


def listed(project, *arguments):
    outcome = project.call("options", "--json", *arguments)
    assert outcome.code == 0, outcome.err
    options: list[dict[str, Any]] = json.loads(outcome.out)["options"]
    return options


def test_all_that_is_known_of_a_version_is_listed_once(project):
    found = listed(project, "--onnxruntime", "1.26")
    assert found == [
        {"section": section, **encode(option), "expected": option.expected}
        for section, known in KNOWN.items()
        for option in known("1.26")
    ]
    for provider, sections in (("session", {"session_config", "attributes"}), ("cuda", {"cuda"})):
        of_provider = listed(project, "--onnxruntime", "1.26", "--provider", provider)
        assert of_provider == [option for option in found if option["section"] in sections]
    wrong = project.call("options", "--provider", "tensorrt")
    assert (wrong.code, wrong.out, "'tensorrt'" in wrong.err) == (2, "", True)


def test_without_a_version_it_is_the_installed_one_and_that_is_not_imported(project):
    code = "import sys; from ortprep.cli.app import run; run(); sys.exit('onnxruntime' in sys.modules)"
    outcome = project.python("-c", code, "options", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out)["onnxruntime"] == installed_onnxruntime()


@pytest.mark.parametrize("part", ["spin", "SPIN", "memory", "use_tf32"])
def test_a_part_of_a_name_finds_every_name_it_is_in(project, part):
    every = listed(project)
    found = listed(project, part)
    assert found == [option for option in every if part.lower() in option["name"].lower()]
    assert 0 < len(found) < len(every)


# What people see


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_option_shows_its_values_default_effect_and_why_it_is_not_to_be_set(project, version):
    outcome = project.call("options", "--onnxruntime", version)
    assert (outcome.code, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 100
    assert not re.search(r"[\t\x1b]", outcome.out)
    shown = dict(re.findall(r"^(\S+)\n((?:  .+\n)+)", outcome.out, re.MULTILINE))
    options = [option for known in KNOWN.values() for option in known(version)]
    assert shown.keys() == {option.name for option in options}
    for option in options:
        before = " or earlier" if option.since == OLDEST else ""
        values = f"{option.expected}; default {option.default}; since {option.since}{before}"
        owner = f"Not to be set: {option.owner}." if option.owner is not None else ""
        expected = f"{option.effect} {values} {owner}" if option.effect else owner
        assert shown[option.name].split() == expected.split()


# What is wrong, or not there


def test_nothing_found_is_empty_data(project):
    table = project.call("options", "prepaking")
    assert (table.code, table.out) == (0, "")
    assert table.err == "no option has 'prepaking' in its name\n"
    assert listed(project, "prepaking") == []


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.20", f"the oldest ONNX Runtime in the table is {OLDEST}; these are its options\n"),
        ("1.99.1", f"the newest ONNX Runtime in the table is {NEWEST}; 1.99.1 may have more\n"),
        (NEWEST, ""),
        (OLDEST, ""),
    ],
)
def test_a_version_beyond_the_table_is_said_to_be(project, version, said):
    outcome = project.call("options", "--json", "--onnxruntime", version)
    assert (outcome.code, outcome.err) == (0, said)
    assert json.loads(outcome.out)["onnxruntime"] == version
