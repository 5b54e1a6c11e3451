"""How many models does `ortprep init` get to a verified bundle without an edit?

`python -m bench.init FOLDER [--out bench/results/init.json]` runs `ortprep init` and `ortprep prepare`,
without a search, on every `.onnx` below a folder. It says for each whether a spec was written, whether the
model ran and whether its bundle was verified. Models are grouped by the folder right below FOLDER that they
are in: say, `developed` for those that `init` was written with, and `unseen` for the others. FOLDER is only
read. Specs and bundles go to `--work`; all but the specs is removed after each model.

A result file that is there already is added to: a model's new row replaces its old one, but whether it was
verified when it was first tried stays as it was.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.models import prepare_command
from bench.result_file import describe_machine, format_results
from ortprep.bundle.manifest import MANIFEST_FILE

_DEFAULTS = """\
targets: [cpu]
tune: {max_trials: 0}
measure: {rounds: 3, cold_rounds: 0, steady_s: 0.05}
"""
_TIMEOUT_S = 900.0
_MAX_SAID = 1000


@dataclass(frozen=True)
class InitOutcome:
    """How far one model came.

    Attributes:
        model: Its path below the folder.
        group: The folder right below it; "" for none.
        size_bytes: Of the model file.
        written: Whether a spec was written.
        ran: Whether the model ran on what the spec says.
        verified: Whether a bundle was made, which verifies it.
        first_verified: Whether it was verified when it was first tried, before `init` was changed for it.
        init_s: Seconds of `ortprep init`.
        said: The last that a failing command said; "" if none failed.
    """

    model: str
    group: str
    size_bytes: int
    written: bool
    ran: bool
    verified: bool
    first_verified: bool
    init_s: float
    said: str


def try_models(folder: Path, work: Path, *, group: str | None = None) -> Iterator[InitOutcome]:
    """Yields how far each model below a folder comes.

    Args:
        folder: Where models are; only read.
        work: Where specs and, for a while, bundles are written.
        group: The group to try; None for all.
    """
    for model in sorted(folder.rglob("*.onnx")):
        parts = model.relative_to(folder).parts
        own = parts[0] if len(parts) > 1 else ""
        if group in (None, own):
            yield _try_model(model, folder, own, work)


def _try_model(model: Path, folder: Path, group: str, work: Path) -> InitOutcome:
    shown = model.relative_to(folder).as_posix()
    configs, artifacts = work / "configs" / shown.replace("/", "-"), work / "artifacts"
    configs.mkdir(parents=True, exist_ok=True)
    (configs / "defaults.yaml").write_text(_DEFAULTS, encoding="utf-8")
    started = time.perf_counter()
    code, said = _run([sys.executable, "-m", "ortprep", "init", str(model), "--out", str(configs), "--force"])
    init_s = time.perf_counter() - started
    specs = [path for path in configs.glob("*.yaml") if path.stem != "defaults"]
    ran, verified = code == 0, False
    if ran:
        name = specs[0].stem
        code, said = _run(prepare_command(configs, artifacts, [name]))
        verified = code == 0 and (artifacts / name / MANIFEST_FILE).is_file()
        shutil.rmtree(artifacts, ignore_errors=True)
    return InitOutcome(
        model=shown,
        group=group,
        size_bytes=model.stat().st_size,
        written=bool(specs),
        ran=ran,
        verified=verified,
        first_verified=verified,
        init_s=round(init_s, 2),
        said="" if verified else said,
    )


def _run(command: Sequence[str]) -> tuple[int, str]:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 1, f"took longer than {_TIMEOUT_S:g} s"
    return ended.returncode, ended.stderr.strip()[-_MAX_SAID:] if ended.returncode else ""


def summarize(outcomes: Sequence[InitOutcome]) -> dict[str, dict[str, int]]:
    """Returns, by group, how many models there are, and how many of them came how far."""
    summary: dict[str, dict[str, int]] = {}
    for group in sorted({one.group for one in outcomes}):
        own = [one for one in outcomes if one.group == group]
        summary[group or "all"] = {
            "models": len(own),
            "written": sum(one.written for one in own),
            "ran": sum(one.ran for one in own),
            "verified": sum(one.verified for one in own),
            "first_verified": sum(one.first_verified for one in own),
        }
    return summary


def add_outcomes(earlier: Sequence[InitOutcome], outcomes: Sequence[InitOutcome]) -> list[InitOutcome]:
    """Returns the rows of all models, by group and model; a new row keeps its model's first try."""
    rows = {one.model: one for one in earlier}
    for one in outcomes:
        first = rows.get(one.model, one).first_verified
        rows[one.model] = replace(one, first_verified=first)
    return sorted(rows.values(), key=lambda one: (one.group, one.model))


def read_outcomes(path: Path) -> list[InitOutcome]:
    """Returns the rows of a result file, none if there is no file."""
    if not path.is_file():
        return []
    return [InitOutcome(**row) for row in json.loads(path.read_text(encoding="utf-8"))["models"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries all models, prints a row for each and writes the result; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.init", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--group", help="try this group alone")
    parser.add_argument("--work", type=Path, help="where specs are kept; else they are removed")
    parser.add_argument("--out", type=Path, help="JSON file of the result; added to if it is there")
    options = parser.parse_args(arguments)
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        for one in try_models(options.folder.absolute(), options.work or Path(scratch), group=options.group):
            outcomes.append(one)
            reached = (
                "verified" if one.verified else "ran" if one.ran else "written" if one.written else "nothing"
            )
            print(f"{reached:<9} {one.init_s:6.1f} s  {one.model}", flush=True)
            if one.said:
                print(f"    {one.said}", flush=True)
    if options.out is not None:
        outcomes = add_outcomes(read_outcomes(options.out), outcomes)
    summary = summarize(outcomes)
    for group, counts in summary.items():
        print(f"{group}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    if options.out is not None:
        result = {
            "machine": describe_machine(),
            "summary": summary,
            "models": [asdict(one) for one in outcomes],
        }
        options.out.write_text(format_results(result) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
