"""The check `gil`: do other Python threads run while ONNX Runtime loads, initialises and runs?"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.diagnose.diagnosis import Diagnosis, Finding, diagnose
from pipeline.diagnose.gil.model import write_heavy_model
from pipeline.diagnose.gil.ticking import Call
from pipeline.diagnose.gil.verdict import Observations, find_in, judge_phases, tabulate
from pipeline.errors import PipelineError
from pipeline.measuring.device_lock import CPU_DEVICE, measuring
from pipeline.runtime.child import run_child
from pipeline.runtime.session import CPU, CUDA

_TIMEOUT_S = 900.0


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
    """
    try:
        with measuring(device):
            seen = observe(model, sample, device)
    except PipelineError as error:
        text = f"could not watch ONNX Runtime make a session: {error.message}"
        return diagnose(
            "gil", [Finding("gil-not-measured", "problem", text, error.hint)], subject=model or ""
        )
    return diagnose(
        "gil", find_in(seen), subject=model or "", tables=[tabulate(seen)], figures=_figures(seen, device)
    )


def observe(model: str | None, sample: str | None, device: str) -> Observations:
    """Returns what a fresh process observes; see `diagnose_gil`. The caller holds the device's lock.

    Raises:
        PipelineError: It could not make the session, or died.
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
    answer = run_child("pipeline.diagnose.gil.watching:watch", request, timeout_s=_TIMEOUT_S).value
    return Observations(
        onnxruntime=answer["onnxruntime"],
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
