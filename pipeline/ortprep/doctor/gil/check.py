"""The check `gil`: do other Python threads run while ONNX Runtime loads, initialises and runs?"""

from __future__ import annotations

from ortprep.bundle.codec import decode, encode
from ortprep.children.child import run_child
from ortprep.children.scratch_folder import scratch_folder
from ortprep.doctor.diagnosis import Diagnosis, diagnose
from ortprep.doctor.doctor_model import guard_device, plan_on, with_threads
from ortprep.doctor.gil.gil_monitor import watch
from ortprep.doctor.gil.heartbeat import GilObservations
from ortprep.doctor.gil.heavy_model import write_heavy_model
from ortprep.doctor.gil.verdict import find_in, judge_phases, tabulate
from ortprep.doctor.process_group import CHILD_TIMEOUT_S
from ortprep.measuring.device_lock import CPU_DEVICE


def diagnose_gil(
    *, model: str | None = None, sample: str | None = None, device: str = CPU_DEVICE
) -> Diagnosis:
    """Watches a fresh process make and run sessions beside a thread that ticks.

    Args:
        model: Path of an ONNX file; None for one that is made for this: 192 MiB of matrices.
        sample: `.npz` file with one array per input of `model`; None to leave runs out.
        device: `cpu`, or `cuda:<ordinal>` to see the making of CUDA sessions too.

    Raises:
        LoadError: The model cannot be loaded or run.
        ChildError: The process died.
        StageError: The folder of the device's lock cannot be trusted, or this thread measures already.
        OSError: There is no room on the disk for the model that is made, the request or the reply.
    """
    with guard_device(device), scratch_folder("ortprep-gil-") as folder:
        files = write_heavy_model(folder) if model is None else (model, sample)
        plan = with_threads(plan_on(str(files[0]), device), 1)
        request = {"plan": encode(plan), "sample": None if files[1] is None else str(files[1])}
        reply = run_child(watch, request, timeout_s=CHILD_TIMEOUT_S)
    observations = decode(GilObservations, reply.value)
    figures = {
        "onnxruntime": observations.onnxruntime,
        "device": device,
        "verdicts": judge_phases(observations),
        "phases": encode(observations.phases),
        "known_to_release": encode(observations.released),
    }
    return diagnose(
        "gil", find_in(observations), subject=model or "", tables=[tabulate(observations)], figures=figures
    )
