"""Writes the pages of recipes from `examples/NAME`, run as `python -m docs.recipe_pages [--run] [NAME]...`.

A recipe is a folder with `run.sh`, whose steps begin with `#: STEP`, and `page.md`. In `page.md`, a line
`{{STEP}}` stands for the commands of a step and what they wrote in one real run, `{{FILE}}` for a file of
the folder with its name above it, and `{{run}}` for a sentence on that run. `--run` runs the script from a
clean copy of the folder, and keeps what the terminal would show as `transcript.txt`. A step that begins with
`#~ STEP` writes other lines on another machine, so that the test does not compare them.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 1800
PORT = "8000"
"""The port in scripts. A run takes a free one instead."""

_SHORT = "measure: {rounds: 3, cold_rounds: 0, steady_s: 0.01}"
_QUICKER_ALL = {
    "steady_s: 0.1": "steady_s: 0.01",
    "steady_s: 0.2": "steady_s: 0.02",
    # No plan keeps this limit, so the prepared one ships, and none is measured twice as long.
    "tune: {max_trials: 0": "tune: {max_private_mb: 1, max_trials: 0",
}
QUICKER: Mapping[str, Mapping[str, str]] = {
    "command_line_tool": {" # no search: this takes a minute": f"\n{_SHORT}"},
    "eight_gpus": {"type=float, default=5": "type=float, default=1"},  # seconds of load
    "int8": {"  ladder: [int8, fp32]": "  search: {max_trials: 1}\n  ladder: [int8, fp32]"},
    "several_models": {"[1, 3, 480, 640]": "[1, 3, 64, 96]", "[1, 3, 48, 480]": "[1, 3, 48, 96]"},
    "slow_start": {
        "cold_rounds: 3": "cold_rounds: 1",
        "--rounds 3": "--rounds 1",
        "1, 3, 48, 480": "1, 3, 48, 96",
        "1,3,48,480": "1,3,48,96",
    },
    "tutorial": {"budget_s: 20": "budget_s: 2.5, steady_s: 0.02"},
    "unmodified_application": {
        # A fifth of the lines, which still come in four shapes.
        "pages 1 4": "pages 1 3",
        "3 * size": "16 * size",
        "--record-inputs 8": "--record-inputs 2",
        # One model of three. The application gets the other two from their files, as it does by default.
        "#~ prepare\nortprep prepare": "#~ prepare\n"
        rf"sed -i 's/^tune:.*/tune: {{max_private_mb: 1, max_trials: 0}}\n{_SHORT}/;"
        "s/shapes: .*/shapes: [[1, 3, 48, 320]]/' "
        "configs/PP-OCRv6_rec_small.yaml\nortprep prepare PP-OCRv6_rec_small",
        "show PP-OCRv6_det_small": "show PP-OCRv6_rec_small",
        "others 2 6": "others 2 1",
        "measure.py 5": "measure.py 1",
        "statistics.quantiles(times[command], n=4)": "times[command] * 3",  # there are none of one
    },
    "web_server": {"measure: {cold_rounds: 0}": _SHORT},
}
"""What a quick run of a recipe has instead of what its script and specs say."""

WIDTH = 120
"""Longer lines of output are folded on the page."""

_FOLDER = textwrap.TextWrapper(
    WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
)
_PAGES = {"tutorial": "tutorial.md"}
_LANGUAGES = {
    ".py": "python",
    ".sh": "shell",
    ".yaml": "yaml",
    ".toml": "toml",
    ".json": "json",
    "": "docker",
}
_STEP = re.compile(r"#[:~] (\S+)")


def recipe_names() -> list[str]:
    """Returns the folders of `examples/` that are recipes."""
    return sorted(path.parent.name for path in EXAMPLES.glob("*/page.md"))


def page_path(name: str) -> Path:
    """Returns where the page of a recipe is."""
    return ROOT / "docs" / _PAGES.get(name, f"recipes/{name}.md")


def run_recipe(name: str, folder: Path, *, is_quick: bool = False) -> str:
    """Copies a recipe to `folder/NAME`, runs its script there, and returns what the terminal shows.

    Args:
        name: The recipe.
        folder: Where it runs.
        is_quick: Whether searches and measurements are as short as `QUICKER` says, for a run whose figures
            nobody reads.

    Raises:
        RuntimeError: The script failed, or took longer than `TIMEOUT_S`.
    """
    place = folder / name
    shutil.copytree(EXAMPLES / name, place, ignore=shutil.ignore_patterns("page.md", "transcript.txt"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    replaced = {PORT: port, **({**_QUICKER_ALL, **QUICKER.get(name, {})} if is_quick else {})}
    for path in (place / "run.sh", *place.rglob("*.yaml"), *place.rglob("*.py")):
        path.write_text(_replace(path.read_text(), replaced))
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("ORTPREP_", "PYTEST_"))},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ORTPREP_CACHE_DIR": str(folder / "cache"),
        "XDG_RUNTIME_DIR": str(folder),  # locks of its own: what others measure is not waited for
        "COLUMNS": "100",
        "PIP_QUIET": "2",
        "PYTHONUNBUFFERED": "1",  # else what several programs write into one file changes its order
    }
    written = folder / "transcript.txt"
    # Ray joins the cluster that its folder names, which may be another test's, or one that was killed.
    with written.open("wb") as file, TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray:
        shell = subprocess.Popen(
            ["bash", "-v", "run.sh"],
            cwd=place,
            env={**environment, "RAY_TMPDIR": ray},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            code: int | str = shell.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = f"no end after {TIMEOUT_S} s"
        finally:
            _kill_group(shell.pid)  # servers that a failed script left behind
            shell.wait()
    shown = {str(place): f"~/{name}", str(ROOT): "~/ortprep"}
    restored = {new: old for old, new in reversed(replaced.items())}
    text = _replace(written.read_text(), {**shown, **restored})
    if code != 0:
        raise RuntimeError(f"{name}/run.sh ended with {code}:\n{text}")
    return text


def _replace(text: str, replaced: Mapping[str, str]) -> str:
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def split_steps(script: str, transcript: str) -> dict[str, list[tuple[bool, str]]]:
    """Returns the lines of every step, each with whether it is a command (else the answer to one).

    Raises:
        ValueError: The transcript is not one of this script.
    """
    steps: dict[str, list[tuple[bool, str]]] = {}
    expected = [line for line in script.splitlines() if line.strip()]
    current: list[tuple[bool, str]] = []
    for line in transcript.splitlines():
        is_command = bool(expected) and line == expected[0]
        if is_command:
            expected.pop(0)
        if is_command and (found := _STEP.fullmatch(line)):
            current = steps.setdefault(found[1], [])
        elif line.strip() or not is_command:
            current.append((is_command, line.rstrip()))
    if expected:
        raise ValueError(f"the transcript lacks the command {expected[0]!r}: run with --run")
    return steps


def _format_step(lines: list[tuple[bool, str]]) -> str:
    if not any(line and not is_command for is_command, line in lines):
        return "\n".join(("```bash", *(line for _, line in lines if line), "```"))
    shown = [
        f"$ {line}" if is_command and line[0] not in " #" else _FOLDER.fill(line)
        for is_command, line in lines
    ]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(shown)).strip("\n")
    return f"```console\n{text}\n```"


def build_page(name: str) -> str:
    """Returns the text of a recipe's page.

    Raises:
        ValueError: A step is not shown, or shown twice, or the transcript is not one of the script.
    """
    folder = EXAMPLES / name
    machine, transcript = (folder / "transcript.txt").read_text().split("\n", 1)
    steps = split_steps((folder / "run.sh").read_text(), transcript)
    up = "../" * page_path(name).relative_to(ROOT).as_posix().count("/")
    source = f"{up}examples/{name}/run.sh"
    seen = f"{up.removeprefix('../')}gpu.md"
    machine = machine.replace("without a GPU", f"[without a GPU]({seen})")
    sentence = textwrap.fill(
        f"All commands are in [`run.sh`]({source}), which a test runs. What they print comes from one run on "
        f"{machine}; what pip prints is left out. Times and figures differ from machine to machine.",
        WIDTH,
        break_on_hyphens=False,
    )
    shown = {"run": sentence, **{step: _format_step(lines) for step, lines in steps.items()}}
    page = (folder / "page.md").read_text()
    wanted = re.findall(r"^\{\{(.+)\}\}$", page, re.MULTILINE)
    if missing := [step for step in steps if wanted.count(step) != 1]:
        raise ValueError(f"{name}/page.md: expected each step once, got another number of {missing}")
    for file in set(wanted) - set(shown):
        language = _LANGUAGES[Path(file).suffix]
        link = f"[`{file}`]({up}examples/{name}/{file})"
        shown[file] = f"{link}:\n\n```{language}\n{(folder / file).read_text().rstrip()}\n```"
    return re.sub(r"^\{\{(.+)\}\}$", lambda found: shown[found[1]], page, flags=re.MULTILINE)


def _describe_machine() -> str:
    runtimes = ("onnxruntime-gpu", "onnxruntime")
    runtime = next(f"{name} {found}" for name in runtimes if (found := _version_of(name)))
    gpu = "with" if Path("/proc/driver/nvidia/gpus").exists() else "without"
    return f"{os.cpu_count()} CPU cores, {gpu} a GPU, with Python {platform.python_version()} and {runtime}"


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except ImportError:
        return None


def main() -> None:
    """Writes the pages; with `--run`, runs the scripts first."""
    parser = argparse.ArgumentParser(prog="python -m docs.recipe_pages", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders of examples/; all without one")
    parser.add_argument("--run", action="store_true", help="run the scripts, and keep what they write")
    arguments = parser.parse_args()
    for name in arguments.names or recipe_names():
        if arguments.run:
            with TemporaryDirectory() as folder:
                text = run_recipe(name, Path(folder).resolve())
            (EXAMPLES / name / "transcript.txt").write_text(f"{_describe_machine()}\n{text}")
        page_path(name).write_text(build_page(name))


if __name__ == "__main__":
    main()
