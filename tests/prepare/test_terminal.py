"""On a terminal there is something to see; what is written is the same, and the build ends."""

from __future__ import annotations

import re

import pytest

from tests.prepare.builders import REPOSITORY, SHAPES, Project, folding_net

DOIT = ["-m", "doit", "-f", str(REPOSITORY / "dodo.py"), "configs={configs}", "artifacts={artifacts}"]
COMMANDS = {
    "ortprep": ["-m", "ortprep", "prepare", "net"],
    "ortprep, two at once": ["-m", "ortprep", "prepare", "-n", "2"],
    "doit": [*DOIT, "verify"],
    "doit, two at once": [*DOIT, "-n", "2", "verify"],
}
LIKE_ANOTHER = ("ortprep", "doit, two at once")  # the other two differ most


def run_on_terminal(project: Project, arguments: list[str]) -> tuple[int, str]:
    """Runs Python on a pseudo-terminal and returns its exit code and what stood there, without colours."""
    folders = {"configs": project.configs, "artifacts": project.artifacts}
    code, written = project.on_terminal(*(argument.format_map(folders) for argument in arguments))
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(command, id=name, marks=pytest.mark.manual if name in LIKE_ANOTHER else ())
        for name, command in COMMANDS.items()
    ],
)
def test_a_build_on_a_terminal_shows_what_runs_and_ends(project: Project, arguments: list[str]) -> None:
    project.add(folding_net(), inputs=SHAPES)
    code, shown = run_on_terminal(project, arguments)
    assert code == 0, shown
    assert re.search(r"[⠁-⣿] [a-z]+:net", shown), "nothing was shown while a task ran"
    last, count = ("package:net", 7) if "ortprep" in arguments else ("verify:net/portable", 5)
    assert f"done {last}" in shown
    if "package" in last:
        assert re.search(r"measure:net/cpu +0:\d\d:\d\d +\d+% +0:\d\d:\d\d", shown)
    assert f"{count} done, 0 up to date" in shown


def test_a_failure_on_a_terminal_is_told_once(project: Project) -> None:
    project.write_spec(source={"path": "missing.onnx"})
    code, shown = run_on_terminal(project, COMMANDS["ortprep"])
    assert code != 0
    assert shown.count("FAILED fetch:net") == 1
    assert shown.count("Traceback") == 0
