"""The check `gil`: do other Python threads run while ONNX Runtime loads, initialises and runs?"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.diagnose.alone import alone_on
from pipeline.diagnose.diagnosis import Diagnosis, diagnose
from pipeline.diagnose.environment.wheels import name_installed, read_wheels
from pipeline.diagnose.gil.model import write_heavy_model
from pipeline.diagnose.gil.ticking import Call
from pipeline.diagnose.gil.verdict import Observations, explain_nothing, find_in, judge_phases, tabulate
from pipeline.diagnose.turns import CHILD_TIMEOUT_S
from pipeline.errors import PipelineError
from pipeline.measuring.device_lock import CPU_DEVICE
from pipeline.runtime.child import run_child
from pipeline.runtime.loading.session import CPU, CUDA


def diagnose_gil(
    *, model: str | None = None, sample: str | None = None, device: str = CPU_DEVICE
) -> Diagnosis:
    """Watches a fresh process make and run sessions beside a thread that ticks.

    Args:
        model: Path of an ONNX file; None for one that is made for this: 192 MiB of matrices.
        sample: `.npz` file with one array per input of `model`; None to leave runs out.
        device: `cpu`, or `cuda:<ordinal>` to see the making of CUDA sessions too.

    Returns:
        A problem where nothing could be observed, rather than an error.

    Raises:
        StageError: The folder of the device's lock cannot be trusted, or this thread measures already.
        OSError: There is no room on the disk for what a process is asked and answers.
    """
    with alone_on(device):
        try:
            seen = observe(model, sample, device)
        except PipelineError as error:
            return diagnose("gil", [explain_nothing(error.message, error.hint)], subject=model or "")
    return diagnose(
        "gil", find_in(seen), subject=model or "", tables=[tabulate(seen)], figures=_figures(seen, device)
    )


def observe(model: str | None, sample: str | None, device: str) -> Observations:
    """Returns what a fresh process observes; see `diagnose_gil`. The caller holds the device's lock.

    Raises:
        PipelineError: It could not make the session, or died.
        OSError: There is no room on the disk for the model that is made, or for what the process answers.
    """
    if model is not None:
        return _observe(model, sample, device)
    with tempfile.TemporaryDirectory(prefix="ortprep-gil-") as folder:
        heavy, its_sample = write_heavy_model(Path(folder))
        return _observe(str(heavy), str(its_sample), device)


def _observe(model: str, sample: str | None, device: str) -> Observations:
    on_cpu = device == CPU_DEVICE
    request = {
        "model": model,
        "sample": sample,
        "provider": CPU if on_cpu else CUDA,
        "provider_options": {} if on_cpu else {"device_id": device.removeprefix("cuda:")},
    }
    answer = run_child("pipeline.diagnose.gil.watching:watch", request, timeout_s=CHILD_TIMEOUT_S).value
    return Observations(
        onnxruntime=answer["onnxruntime"],
        wheel=name_installed(read_wheels()),
        phases={phase: _calls(calls) for phase, calls in answer["phases"].items()},
        released=_calls(answer["released"]),
        held=_calls(answer["held"]),
    )


def _calls(answered: Sequence[Mapping[str, Any]]) -> tuple[Call, ...]:
    return tuple(Call(**fields) for fields in answered)


def _figures(seen: Observations, device: str) -> dict[str, Any]:
    return {
        "onnxruntime": seen.onnxruntime,
        "device": device,
        "verdicts": judge_phases(seen),
        "phases": {phase: [asdict(call) for call in calls] for phase, calls in seen.phases.items()},
        "controls": {
            "released": [asdict(call) for call in seen.released],
            "held": [asdict(call) for call in seen.held],
        },
    }
