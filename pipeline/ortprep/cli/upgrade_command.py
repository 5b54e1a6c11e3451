"""`ortprep upgrade-check`: the gate between two versions of ONNX Runtime, for continuous integration."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated

import typer

from ortprep.bundle.codec import encode
from ortprep.children.scratch_folder import scratch_folder
from ortprep.cli.command import ARTIFACTS, CONFIGS, Artifacts, AsJson, Configs, command
from ortprep.cli.console import echo, write_json, write_table
from ortprep.cli.model_resolution import Locations, examine_prepared
from ortprep.doctor.upgrade.comparison import (
    FIGURES,
    ROUNDS,
    UpgradeCheck,
    UpgradeRun,
    check_upgrade,
    describe_verdict,
)
from ortprep.doctor.upgrade.environments import parse_versions
from ortprep.errors import PipelineError
from ortprep.measuring.change import FIGURES as UNITS
from ortprep.measuring.change import parse_limits
from ortprep.measuring.comparison import MIN_ROUNDS
from ortprep.quoting import printable
from ortprep.tables import Cell, fill_table, format_spread


@command
def upgrade_check(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Models, or paths of bundles.")],
    onnxruntime: Annotated[
        str,
        typer.Option(metavar="V,V", help="Versions of ONNX Runtime; the others are compared with the first."),
    ],
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    target: Annotated[
        str | None,
        typer.Option(metavar="T", help="cpu or cuda; by default what a job on this machine takes."),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            min=MIN_ROUNDS, max=99, help="Fresh processes per version, for the bundle and for its source."
        ),
    ] = ROUNDS,
    fail_over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT",
            help="How much worse a figure may become: 10% (the default), or ready=20% for one figure; "
            "may be repeated.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Try bundles on other versions of ONNX Runtime, and fail if anything becomes worse or wrong."""
    versions, limits = parse_versions(onnxruntime), parse_limits(fail_over or ())
    checks = []
    for name in names:
        with scratch_folder("ortprep-upgrade-") as folder:
            subject = examine_prepared(name, Locations(folder, configs, artifacts))
            echo(f"{subject.name}: ONNX Runtime {', '.join(versions)}")
            checks.append(check_upgrade(subject, versions, target=target, rounds=rounds, limits=limits))
        if not json:
            _write_check(checks[-1])
    if json:
        write_json([encode(check) | {"outcome": check.outcome} for check in checks])
    _judge(checks)


def _write_check(check: UpgradeCheck) -> None:
    """Writes one row per load of a bundle by a version of ONNX Runtime, and what there is to remark."""
    write_table(
        fill_table(
            f"{check.name} on {check.device}",
            check.runs,
            (
                ("version", lambda run: run.case.version),
                ("loads", lambda run: f"{run.case.way}: {run.variant}" if run.variant else run.case.way),
                ("answers", lambda run: "as recorded" if run.failure is None else None),
                *(
                    (f"{name} {UNITS[name]}", functools.partial(_figure, name))
                    for name in FIGURES
                    if any(name in run.figures for run in check.runs)
                ),
                ("verdict", lambda run: describe_verdict(run, check.versions[0])),
            ),
        )
    )
    for remark in check.remarks:
        echo(printable(f"{check.name}: {remark}", lines=False))


def _figure(name: str, run: UpgradeRun) -> Cell | None:
    """Returns a figure of a run, with its ratio to the first version's."""
    summary = run.figures.get(name)
    if summary is None:
        return None
    ratio = next((change.ratio for change in run.changes if change.figure == name), None)
    compared = "" if ratio is None else f" ({ratio:.2f}×)"
    return Cell(f"{format_spread(summary)}{compared}", summary.median)


def _judge(checks: Sequence[UpgradeCheck]) -> None:
    """Raises `PipelineError` if anything became worse or is wrong."""
    lines = [
        printable(f"\n  {check.name}, {' '.join(failure.split())}")
        for check in checks
        for failure in check.failures
    ]
    if lines:
        raise PipelineError(f"worse or wrong on another ONNX Runtime:{''.join(lines)}")
