"""What became worse from one version of ONNX Runtime to another. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ortprep.bundle.figures import Samples
from ortprep.children.probe import ProbeResult
from ortprep.doctor.upgrade.session_check import SessionCheck
from ortprep.measuring.change import Change, RegressionLimits, compare_figure
from ortprep.measuring.comparison import is_below

Way: TypeAlias = Literal["bundle", "source"]
"""How a model is loaded: its bundle by `load`, or its source by plain ONNX Runtime."""

FIGURES = {"ready": "ready_ms", "steady": "steady_ms", "private": "private_mb", "gpu": "gpu_mb"}
"""What is compared, as users name it, and the field of a `ProbeResult`."""

_Values: TypeAlias = Mapping[str, Sequence[float]]
"""A figure per round, in the order of the rounds, by the figure's name."""


@dataclass(frozen=True)
class UpgradeCase:
    """One way to load a model, on one version of ONNX Runtime."""

    way: Way
    version: str

    def __str__(self) -> str:
        return f"{self.way} on {self.version}"


@dataclass(frozen=True)
class UpgradeRun:
    """What became of a case.

    Attributes:
        variant: The bundle's variant that `load` took; None for the source, or if it did not load.
        failure: Why it does not load, or how it answers wrongly; None if it answers as recorded.
        figures: Ready and steady time in ms, private and GPU memory in MB of 2**20 bytes, as in `FIGURES`.
        changes: Against the same way on the first version; none for the first version itself.
    """

    case: UpgradeCase
    variant: str | None = None
    failure: str | None = None
    figures: Mapping[str, Samples] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class UpgradeCheck:
    """A model on several versions of ONNX Runtime.

    Attributes:
        name: Name of the model.
        device: What it was measured on: `cpu` or `cuda:0`.
        versions: Versions of ONNX Runtime; the others are compared with the first.
        runs: Every case, the bundle first.
        failures: What became worse or is wrong, a sentence each; none if the upgrade is safe.
        remarks: Further facts for the reader, a sentence each.
    """

    name: str
    device: str
    versions: tuple[str, ...]
    runs: tuple[UpgradeRun, ...]
    failures: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def outcome(self) -> Literal["ok", "worse"]:
        """Whether a later version may take the first one's place."""
        return "worse" if self.failures else "ok"


def judge_upgrade(
    checks: Mapping[UpgradeCase, SessionCheck | str],
    results: Mapping[UpgradeCase, Sequence[ProbeResult] | str],
    limits: RegressionLimits,
) -> tuple[UpgradeRun, ...]:
    """Returns what became of every case.

    Args:
        checks: Every case in order, the first version's before the others', or why its answers do not count.
        results: Per case that was measured, a result per round, or why it failed.
        limits: How much worse a figure may become.
    """
    runs: dict[UpgradeCase, UpgradeRun] = {}
    baselines: dict[Way, _Values] = {}
    for case, check in checks.items():
        measured = results.get(case, ())
        failures = [one for one in (check, measured) if isinstance(one, str)]
        values = {} if isinstance(measured, str) else _values_of(measured)
        runs[case] = UpgradeRun(
            case,
            variant=None if isinstance(check, str) else check.variant,
            failure=failures[0] if failures else None,
            figures={name: Samples.of(own) for name, own in values.items()},
            changes=_compare(baselines.get(case.way, {}), values, limits),
        )
        baselines.setdefault(case.way, values)
    return tuple(runs.values())


def describe_verdict(run: UpgradeRun, baseline: str) -> str:
    """Returns what became of a case in a few words.

    Args:
        run: The case.
        baseline: The version that the others are compared with.
    """
    worse = [change.figure for change in run.changes if change.verdict == "regression"]
    if run.failure is not None:
        return "fails"
    if run.case.version == baseline:
        return "baseline"
    if not run.changes:
        return "not compared"
    return f"worse: {', '.join(worse)}" if worse else "no worse"


def find_failures(runs: Sequence[UpgradeRun]) -> tuple[str, ...]:
    """Returns a sentence for everything that is wrong, or became worse beyond its limit and the noise."""
    failures = [f"{run.case}: {run.failure}" for run in runs if run.failure is not None]
    failures += [
        f"{run.case}: {change}" for run in runs for change in run.changes if change.verdict == "regression"
    ]
    return tuple(failures)


def find_remarks(checks: Mapping[UpgradeCase, SessionCheck | str]) -> tuple[str, ...]:
    """Returns a sentence for every version on which `load` takes another variant than the bundle prefers."""
    return tuple(
        f"{case}: takes variant {check.variant}; passed over {'; '.join(check.passed_over)}"
        for case, check in checks.items()
        if isinstance(check, SessionCheck) and check.passed_over
    )


def _values_of(results: Sequence[ProbeResult]) -> _Values:
    """Returns the figures of every round, by name; those that were not measured are left out."""
    figures = {name: [getattr(result, field) for result in results] for name, field in FIGURES.items()}
    return {name: values for name, values in figures.items() if values and None not in values}


def _compare(old: _Values, new: _Values, limits: RegressionLimits) -> tuple[Change, ...]:
    """Returns what changed; a regression also has to show in most rounds: both saw the same machine."""
    changes = []
    for name in (name for name in old if name in new):
        found = compare_figure(name, Samples.of(old[name]), Samples.of(new[name]), limits, cache="warm")
        if found.verdict == "regression" and not is_below(old[name], new[name]):
            found = replace(found, verdict="noise")
        changes.append(found)
    return tuple(changes)
