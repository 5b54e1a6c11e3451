"""A bundle and its source on several versions of ONNX Runtime, in interleaved fresh processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.loader_config import LoaderConfig, read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.children.child import Interpreter, run_child
from ortprep.children.probe import ProbeRequest, ProbeResult, measure_plan
from ortprep.children.scratch_folder import scratch_folder
from ortprep.doctor.doctor_model import DoctorModel, guard_device, plan_on
from ortprep.doctor.upgrade import session_check
from ortprep.doctor.upgrade.environments import list_requirements, open_environment
from ortprep.doctor.upgrade.session_check import SessionCheck
from ortprep.doctor.upgrade.verdict import (
    UpgradeCase,
    UpgradeCheck,
    Way,
    find_failures,
    find_remarks,
    judge_upgrade,
)
from ortprep.errors import BundleError, PipelineError
from ortprep.measuring.change import RegressionLimits
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.measuring.rounds import run_interleaved
from ortprep.quoting import quoted
from ortprep.runtime.loading.variant_selection import needs_gpu, serves
from ortprep.runtime.machine.hardware import read_hardware

ROUNDS = 5
_STEADY_S = 0.5
_TIMEOUT_S = 6 * 3600.0
_FIRST_GPU = "cuda:0"


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
        target: As `load` takes it.
        rounds: Fresh processes per version and way, at least 3.
        limits: How much worse a figure may become; 10 % by default.

    Raises:
        InstallationError: A version cannot be installed.
        BundleError: There is no bundle, or it cannot be read.
        StageError: The folder of the device's lock cannot be trusted.
        OSError: The disk is full.
    """
    if subject.bundle is None:
        raise BundleError(f"no bundle: {subject.name}", hint=f"ortprep prepare {quoted(subject.name)}")
    bundle = Path(subject.bundle)
    config, manifest = read_loader_config(bundle), read_manifest(bundle)
    gpu = any(needs_gpu(variant.requirements) for variant in config.variants)
    device = _choose_device(config, target)
    with scratch_folder("ortprep-upgrade-") as folder:
        interpreters = {
            version: open_environment(list_requirements(manifest, version, gpu=gpu), folder / version)
            for version in versions
        }
        with guard_device(device):
            session = _UpgradeSession(subject, device, target, interpreters)
            checks = session.check_all()
            results = session.measure_all(checks, rounds)
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


class _UpgradeSession:
    """What every process of a check is started with."""

    def __init__(
        self,
        subject: DoctorModel,
        device: str,
        target: str | None,
        interpreters: Mapping[str, Interpreter],
    ) -> None:
        self._bundle, self._target, self._interpreters = subject.bundle, target, interpreters
        self._sample = subject.sample
        self._plan = None if subject.source is None else plan_on(subject.source, device)
        ways: tuple[Way, ...] = ("bundle",) if self._plan is None else ("bundle", "source")
        cases = (UpgradeCase(way, version) for way in ways for version in interpreters)
        self._cases = {str(case): case for case in cases}

    def check_all(self) -> dict[UpgradeCase, SessionCheck | str]:
        """Returns whether each case loads and answers as recorded, or why not."""
        return {case: self._check(case) for case in self._cases.values()}

    def _check(self, case: UpgradeCase) -> SessionCheck | str:
        request: dict[str, Any] = {"bundle": self._bundle, "target": self._target}
        function = session_check.check_bundle
        if case.way == "source":
            request["plan"], function = encode(self._plan), session_check.check_source
        try:
            reply = run_child(
                function,
                request,
                timeout_s=_TIMEOUT_S,
                interpreter=self._interpreters[case.version],
            )
        except PipelineError as error:
            return error.message
        return decode(SessionCheck, reply.value)

    def measure_all(
        self, checks: Mapping[UpgradeCase, SessionCheck | str], rounds: int
    ) -> dict[UpgradeCase, Sequence[ProbeResult] | str]:
        """Measures the cases that answer as recorded, interleaved; returns results, or why a case failed."""
        checked = {str(case): check for case, check in checks.items() if isinstance(check, SessionCheck)}

        def measure(name: str) -> ProbeResult:
            return self._measure(self._cases[name], io_binding=checked[name].io_binding)

        # A first round brings every file into the page cache, and does not count.
        warm = run_interleaved(tuple(checked), measure, max_rounds=1)
        runs = run_interleaved(tuple(warm.rounds), measure, max_rounds=rounds)
        results: dict[str, Sequence[ProbeResult] | str] = {**warm.failures, **runs.failures, **runs.rounds}
        return {self._cases[name]: result for name, result in results.items()}

    def _measure(self, case: UpgradeCase, *, io_binding: bool) -> ProbeResult:
        request = ProbeRequest(self._plan, self._sample, _STEADY_S)
        if case.way == "bundle":
            request = ProbeRequest(
                None,
                self._sample,
                _STEADY_S,
                bundle=self._bundle,
                target=self._target,
                io_binding=io_binding,
            )
        return measure_plan(request, timeout_s=_TIMEOUT_S, interpreter=self._interpreters[case.version])
