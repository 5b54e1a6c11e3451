"""`upgrade-check`: a bundle and its source on several versions of ONNX Runtime, in interleaved processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from ortprep.bundle.figures import Samples
from ortprep.bundle.loader_config import LoaderConfig, read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import Interpreter, run_child
from ortprep.children.probe import ProbeRequest, ProbeResult
from ortprep.children.scratch_folder import scratch_folder
from ortprep.doctor.doctor_model import CHILD_TIMEOUT_S, DoctorModel, guard_device, measure_loads, plan_on
from ortprep.doctor.upgrade.environments import list_requirements, open_environment
from ortprep.doctor.upgrade.session_check import SessionCheck, SessionRequest, check_session
from ortprep.errors import BundleError, PipelineError
from ortprep.measuring.change import Change, RegressionLimits, compare_figure
from ortprep.measuring.comparison import is_below
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.quoting import quoted
from ortprep.runtime.loading.variant_selection import needs_gpu, serves
from ortprep.runtime.machine.hardware import read_hardware

Way: TypeAlias = Literal["bundle", "source"]
"""How a model is loaded: its bundle by `load`, or its source by plain ONNX Runtime."""

FIGURES = {"ready": "ready_ms", "steady": "steady_ms", "private": "private_mb", "gpu": "gpu_mb"}
"""What is compared, as users name it, and the field of a `ProbeResult`."""

ROUNDS = 5
_STEADY_S = 0.5
_FIRST_GPU = "cuda:0"

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
    """Result of a case.

    Attributes:
        variant: The bundle's variant that `load` took; None for the source, or if it did not load.
        failure: Reason why it does not load or answers wrongly; None if it answers as recorded.
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
        device: Device of the measurement: `cpu` or `cuda:0`.
        versions: Versions of ONNX Runtime; the others are compared with the first.
        runs: Every case, the bundle first.
        failures: A sentence for each regression or error; none if the upgrade is safe.
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


def check_upgrade(
    subject: DoctorModel,
    versions: Sequence[str],
    *,
    target: str | None = None,
    rounds: int = ROUNDS,
    limits: RegressionLimits | None = None,
) -> UpgradeCheck:
    """Loads, runs and measures a bundle, and its source where it is known, on every version.

    Args:
        subject: The model; its sample is the bundle's golden one.
        versions: Versions of ONNX Runtime; the others are compared with the first.
        target: Target for `load`.
        rounds: Fresh processes per version and way, at least 3.
        limits: Limits of a regression; 10 % by default.

    Raises:
        InstallationError: A version cannot be installed.
        BundleError: There is no bundle, or it cannot be read.
        StageError: The folder of the device's lock cannot be trusted.
        OSError: The disk is full.
    """
    if subject.bundle is None:
        raise BundleError(f"no bundle: {subject.name}", hint=f"ortprep prepare {quoted(subject.name)}")
    config, manifest = read_loader_config(Path(subject.bundle)), read_manifest(Path(subject.bundle))
    gpu = any(needs_gpu(variant.requirements) for variant in config.variants)
    device = _choose_device(config, target)
    plans: dict[Way, SessionPlan | None] = {"bundle": None}
    if subject.source is not None:
        plans["source"] = plan_on(subject.source, device)
    with scratch_folder("ortprep-upgrade-") as folder:
        cases = {
            UpgradeCase(way, version): (
                SessionRequest(subject.bundle, target, plan),
                open_environment(list_requirements(manifest, version, gpu=gpu), folder / way / version),
            )
            for way, plan in plans.items()
            for version in versions
        }
        with guard_device(device):
            checks = {case: _check(*settings) for case, settings in cases.items()}
            results = _measure(cases, checks, subject.sample, rounds)
    runs = judge_upgrade(checks, results, limits or RegressionLimits())
    remarks = (*subject.remarks, *find_remarks(checks))
    return UpgradeCheck(subject.name, device, tuple(versions), runs, find_failures(runs), remarks)


def _choose_device(config: LoaderConfig, target: str | None) -> str:
    """Returns where jobs here run the bundle: the first of its variants decides whose device is here."""
    has_gpu = bool(read_hardware().gpus)
    for variant in config.variants:
        on_gpu = needs_gpu(variant.requirements)
        if serves(variant, target) and (has_gpu or not on_gpu):
            return _FIRST_GPU if on_gpu else CPU_DEVICE
    return CPU_DEVICE


def _check(request: SessionRequest, interpreter: Interpreter) -> SessionCheck | str:
    """Returns what loads and answers as recorded, or why nothing does."""
    try:
        return run_child(check_session, request, timeout_s=CHILD_TIMEOUT_S, interpreter=interpreter).value
    except PipelineError as error:
        return error.message


def _measure(
    cases: Mapping[UpgradeCase, tuple[SessionRequest, Interpreter]],
    checks: Mapping[UpgradeCase, SessionCheck | str],
    sample: str,
    rounds: int,
) -> dict[UpgradeCase, Sequence[ProbeResult] | str]:
    """Measures the cases that answer as recorded, interleaved; returns results, or why a case failed."""
    requests: dict[str, ProbeRequest] = {}
    for case, check in checks.items():
        if isinstance(check, SessionCheck):
            asked, _ = cases[case]
            request = ProbeRequest(asked.plan, sample, _STEADY_S)
            if asked.plan is None:
                request = replace(
                    request, bundle=asked.bundle, target=asked.target, io_binding=check.io_binding
                )
            requests[str(case)] = request
    interpreters = {str(case): interpreter for case, (_, interpreter) in cases.items()}
    runs = measure_loads(requests, rounds=rounds, interpreters=interpreters)
    results: dict[str, Sequence[ProbeResult] | str] = {**runs.failures, **runs.rounds}
    return {case: results[str(case)] for case in checks if str(case) in results}


def judge_upgrade(
    checks: Mapping[UpgradeCase, SessionCheck | str],
    results: Mapping[UpgradeCase, Sequence[ProbeResult] | str],
    limits: RegressionLimits,
) -> tuple[UpgradeRun, ...]:
    """Returns what became of every case. Pure.

    Args:
        checks: Every case in order, the first version's before the others', or why its answers do not count.
        results: Per case that was measured, a result per round, or why it failed.
        limits: Limits of a regression.
    """
    runs: list[UpgradeRun] = []
    baselines: dict[Way, _Values] = {}
    for case, check in checks.items():
        measured = results.get(case, ())
        failures = [one for one in (check, measured) if isinstance(one, str)]
        values = {} if isinstance(measured, str) else _values_of(measured)
        run = UpgradeRun(
            case,
            variant=None if isinstance(check, str) else check.variant,
            failure=failures[0] if failures else None,
            figures={name: Samples.of(own) for name, own in values.items()},
            changes=_compare(baselines.get(case.way, {}), values, limits),
        )
        runs.append(run)
        baselines.setdefault(case.way, values)
    return tuple(runs)


def describe_verdict(run: UpgradeRun, baseline: str) -> str:
    """Returns what became of a case in a few words.

    Args:
        run: Result of the case.
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
