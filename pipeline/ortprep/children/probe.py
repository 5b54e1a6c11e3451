"""Costs of a way of loading a model, measured in a fresh process that loads as production does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.children.probe_process import measure, used_gpu_bytes
from ortprep.errors import ChildError
from ortprep.runtime.loading.session import CUDA
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.machine.memory import drop_file

ProbeFunction: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]

_MB = 2**20
_SCRIPT = Path(__file__).with_name("probe_script.py")


@dataclass(frozen=True)
class ProbeRequest:
    """A measurement: of `load` with a bundle, or of plain ONNX Runtime by a plan.

    Attributes:
        plan: How `onnxruntime.InferenceSession` is called without a `bundle`; with one, what it records, or
            None if that is not known.
        sample: `.npz` file with one array per input, by its name.
        steady_s: Seconds of repeated runs after the first.
        drop_cache: Files that are dropped from the page cache before the process is started.
        bundle: Folder of a bundle; None for plain ONNX Runtime.
        more_samples: Samples of other shapes: each is run `steady_s` seconds after the first one's runs.
        forked: Measures a fork of a process that opened the bundle with `load_before_fork`: times begin at
            the fork, which is `init_ms`, and `private_mb` is the memory that the fork has written to.
    """

    plan: SessionPlan | None
    sample: str
    steady_s: float
    drop_cache: tuple[str, ...] = ()
    bundle: str | None = None
    more_samples: tuple[str, ...] = ()
    forked: bool = False


@dataclass(frozen=True)
class ProbeResult:
    """The measurements of one process.

    Attributes:
        ready_ms: From just before the process is spawned to its first result: interpreter, imports, checks,
            initialisation and first run. Reading the sample is not in it.
        init_ms: `InferenceSession(…)`; or `from ortprep.runtime import load` and `load(…)`.
        first_ms: First run, on the request's sample.
        steady_ms: Later runs: median; in a trial, the mean over the declared shapes by their weights.
        private_mb: Anonymous memory after the last run, in MB of 2**20 bytes.
        peak_mb: Largest resident set, mapped pages included, in MB of 2**20 bytes.
        gpu_mb: GPU memory in use after the last run beyond what was in use before the process started; None
            where no GPU took part.
        runs: Number of later runs.
        more_steady_ms: Median later run of each of `more_samples`.
    """

    ready_ms: float
    init_ms: float
    first_ms: float
    steady_ms: float
    private_mb: float
    peak_mb: float
    gpu_mb: float | None = None
    runs: int = 0
    more_steady_ms: tuple[float, ...] = ()

    @property
    def first_result_ms(self) -> float:
        """Session and first run together."""
        return self.init_ms + self.first_ms

    @property
    def start_ms(self) -> float:
        """Time before the session: interpreter and imports."""
        return self.ready_ms - self.first_result_ms

    def with_start(self, start_ms: float) -> ProbeResult:
        """Returns the figures with `start_ms` for interpreter and imports.

        These do not depend on the plan. On a busy machine they vary by more than a small model's whole
        session takes.
        """
        return replace(self, ready_ms=start_ms + self.first_result_ms)


def join_results(
    plan: str, results: Sequence[ProbeResult], *, cost_ratios: Sequence[float] = ()
) -> PlanFigures:
    """Returns what the processes of one plan measured, round by round; GPU memory only if all reported it.

    Args:
        plan: Name of the plan.
        results: One per process, at least one.
        cost_ratios: Costs of a job relative to the default's in the same rounds, if these are known.
    """
    gpu_mb = [result.gpu_mb for result in results if result.gpu_mb is not None]
    return PlanFigures(
        plan=plan,
        ready_ms=Samples.of(result.ready_ms for result in results),
        init_ms=Samples.of(result.init_ms for result in results),
        first_ms=Samples.of(result.first_ms for result in results),
        steady_ms=Samples.of(result.steady_ms for result in results),
        private_mb=Samples.of(result.private_mb for result in results),
        peak_mb=Samples.of(result.peak_mb for result in results),
        gpu_mb=Samples.of(gpu_mb) if len(gpu_mb) == len(results) else None,
        cost_ratio=Samples.of(cost_ratios) if cost_ratios else None,
    )


def measure_plan(
    request: ProbeRequest,
    *,
    timeout_s: float,
    memory_bytes: int | None = None,
    function: ProbeFunction = measure,
) -> ProbeResult:
    """Measures one load in one fresh process.

    The caller holds the device's lock, so that nothing else disturbs the clock or the GPU's memory.

    Args:
        request: The model to load and run.
        timeout_s: Deadline of the process.
        memory_bytes: Most private memory the process may take; None for no limit.
        function: What the process does with the session, if more than to measure: it takes and returns what
            `probe_process.measure` does; a subclass of the request has further fields for it.

    Raises:
        LoadError: The session could not be made.
        ChildError: The process died, or its deadline passed.
        PipelineError: Anything else that making the session or reading the sample raises.
    """
    gpu = _gpu_of(request)
    for file in request.drop_cache:
        drop_file(Path(file))
    before_bytes = None if gpu is None else used_gpu_bytes(gpu)
    job: dict[str, Any] = encode(request) | {"gpu": gpu}
    reply = run_child(
        function,
        job,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        script=_SCRIPT,
    )
    answer = reply.value
    answer["ready_ms"] = (answer.pop("ready_s") - answer.pop("forked_s", reply.started_s)) * 1e3
    after_bytes = answer.pop("gpu_bytes")
    on_gpu = before_bytes is not None and after_bytes is not None
    answer["gpu_mb"] = (after_bytes - before_bytes) / _MB if on_gpu else None
    return decode(ProbeResult, answer)


def _gpu_of(request: ProbeRequest) -> str | None:
    """Returns the name of the request's GPU; asked here, so that the child's start of CUDA is its own."""
    if request.plan is None and request.bundle is None:
        raise ChildError("nothing to measure\n  expected a plan or a bundle")
    ordinal = 0
    if request.plan is not None:
        options = next((record.options for record in request.plan.providers if record.name == CUDA), None)
        if options is None:
            return None
        ordinal = int(options.get("device_id", "0"))
    gpus = read_hardware().gpus
    return gpus[ordinal].uuid if ordinal < len(gpus) else None
