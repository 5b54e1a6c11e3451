"""The pages of recipes are made from scripts that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.recipe_pages import EXAMPLES, WIDTH, build_page, page_path, recipe_names, run_recipe, split_steps

ROOT = Path(__file__).parent.parent
RECIPES = recipe_names()


def stable_lines(name: str, transcript: str) -> list[str]:
    """Returns what a script writes on every machine: without figures, and without steps marked with `#~`."""
    script = (EXAMPLES / name / "run.sh").read_text()
    lines = [
        line
        for step, shown in split_steps(script, transcript).items()
        if f"#: {step}" in script.splitlines()
        for is_command, line in shown
        if not is_command
    ]
    words = [" ".join("#" if re.search(r"\d", word) else word for word in line.split()) for line in lines]
    return [line for line in words if line.strip("─ ")]


@pytest.mark.parametrize("name", RECIPES)
def test_a_page_is_made_from_its_recipe(name: str) -> None:
    assert page_path(name).read_text() == build_page(name), f"run: python -m docs.recipe_pages {name}"


@pytest.mark.parametrize("name", RECIPES)
def test_every_command_of_a_page_is_in_the_script(name: str) -> None:
    script = (EXAMPLES / name / "run.sh").read_text().splitlines()
    page = (EXAMPLES / name / "page.md").read_text()
    assert re.findall(r"```(?:bash|sh|console)", page) == []
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", page_path(name).read_text(), re.DOTALL)
    shown = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line[:2] == "$ "]
    assert [line for line in shown if line not in script] == []
    assert blocks


@pytest.mark.parametrize("name", RECIPES)
def test_the_lines_of_a_page_wrap(name: str) -> None:
    lines = page_path(name).read_text().splitlines()
    assert [line for line in lines if len(line) > WIDTH and not line.startswith("|")] == []


@pytest.mark.parametrize("name", RECIPES)
def test_every_file_of_a_recipe_is_on_its_page(name: str) -> None:
    page = page_path(name).read_text()
    folder = EXAMPLES / name
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    made = {"page.md", "run.sh", "transcript.txt"}
    hidden = [file for file in files if file not in made and f"[`{file}`](" not in page]
    assert [file for file in hidden if "__pycache__" not in file] == []


def test_a_dockerfile_takes_the_onnxruntime_that_its_page_shows() -> None:
    text = (EXAMPLES / "several_models" / "Dockerfile").read_text()
    _, recorded = (EXAMPLES / "several_models" / "transcript.txt").read_text().split("\n", 1)
    pinned = set(re.findall(r"ARG ONNXRUNTIME=(\S+)", text))
    assert pinned == set(re.findall(r"^onnxruntime-gpu==(\S+)$", recorded, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_from_a_clean_folder_and_writes_what_its_page_shows(name: str, tmp_path: Path) -> None:
    _, recorded = (EXAMPLES / name / "transcript.txt").read_text().split("\n", 1)
    assert stable_lines(name, run_recipe(name, tmp_path)) == stable_lines(name, recorded)
