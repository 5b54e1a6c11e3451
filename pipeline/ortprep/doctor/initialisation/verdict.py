"""Findings about the phases of a start, and how to remove them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.initialisation.phases import TITLES, Initialisation, PhaseName

WORTH_TELLING = 0.1
"""Share of the time to the first result from which on a phase is a finding."""

ACCOUNTED = 0.1
"""Largest relative difference between the sum of the phases and an initialisation without logging."""

PREPARE = "ortprep prepare   (with a spec of the model in configs/: ortprep schema, docs/spec.md)"
"""The first step for a model without a bundle."""

_TUNE = "ortprep tune   (with the model's spec; docs/tuning.md)"


@dataclass(frozen=True)
class Start:
    """How a job gets to its first result; in ms.

    Attributes:
        numpy_ms: Importing numpy.
        onnxruntime_ms: Importing ONNX Runtime.
        initialisation: Making the session, taken apart.
        first_extra_ms: How much longer the first run takes than later ones.
        steady_ms: A later run.
        measured_init_ms: Making the session, in processes without logging.
        on_gpu: Whether it is for a GPU.
        is_prepared: Whether it is of a bundle.
        weights_outside: Whether the weights are in a file of their own.
        is_apart: Whether processes with and without logging differ beyond the noise.
    """

    numpy_ms: float
    onnxruntime_ms: float
    initialisation: Initialisation
    first_extra_ms: float
    steady_ms: float
    measured_init_ms: float
    on_gpu: bool
    is_prepared: bool = False
    weights_outside: bool = False
    is_apart: bool = True

    @property
    def total_ms(self) -> float:
        """From the first import to the first result."""
        imports_ms = self.numpy_ms + self.onnxruntime_ms
        return imports_ms + self.initialisation.total_ms + self.first_extra_ms + self.steady_ms


@dataclass(frozen=True)
class _Measure:
    """Something that removes phases, or most of them.

    Attributes:
        code: Of the finding.
        phases: What it removes.
        does: What it is, continuing "… most of that is saved by".
        hint: How to get it.
    """

    code: str
    phases: tuple[PhaseName, ...]
    does: str
    hint: str


_OPTIMISED = _Measure(
    "optimised-at-every-load",
    ("inline", "optimise"),
    "optimising the graph once, before deployment, and loading it with optimisation off",
    PREPARE,
)
_MAPPED = _Measure(
    "weights-inside-the-model-file",
    ("parse", "weights_out"),
    "keeping the weights in a file of their own, which is mapped instead of parsed and copied",
    PREPARE,
)
_PACKED = _Measure(
    "prepacked-at-every-load",
    ("prepack",),
    "storing the weights packed, or leaving them unpacked where runs are no slower for it",
    _TUNE,
)
_DEVICES = _Measure(
    "device-made-ready-at-every-load",
    ("provider",),
    "making the devices of a node ready at once, each in a process of its own",
    "SessionPool(bundle)   (docs/serving.md)",
)
_COPIED = _Measure(
    "weights-copied-to-the-device",
    ("weights_in",),
    "reading weights in several threads and giving them one block of memory",
    _TUNE,
)


def measures_for(start: Start) -> tuple[_Measure, ...]:
    """Returns what could remove parts of a start, by its kind."""
    prepared = () if start.is_prepared else (_OPTIMISED,)
    mapped = () if start.is_prepared or start.weights_outside else (_MAPPED,)
    on_gpu = (_DEVICES, _COPIED) if start.on_gpu else ()
    return (*prepared, *mapped, _PACKED, *on_gpu)


def find_in_start(start: Start) -> tuple[Finding, ...]:
    """Returns what a start shows, and which measure would remove which part of it."""
    return (*_accounts(start), *_measures(start), *_first_run(start))


def saved_by(start: Start) -> dict[str, float]:
    """Returns by measure how much of the start, in ms, its phases are: the most that it can save."""
    return {measure.code: start.initialisation.ms(*measure.phases) for measure in measures_for(start)}


def _accounts(start: Start) -> Iterator[Finding]:
    traced_ms, measured_ms = start.initialisation.total_ms, start.measured_init_ms
    share = traced_ms / measured_ms if measured_ms else 1.0
    text = (
        f"the phases add up to {traced_ms:.0f} ms, {share:.0%} of the {measured_ms:.0f} ms "
        "that processes without logging took"
    )
    hint = "run it again while the machine is idle, or with more --rounds"
    if abs(share - 1) <= ACCOUNTED:
        yield Finding("phases-add-up", "ok", text)
    elif start.is_apart:
        yield Finding("phases-do-not-add-up", "note", text, hint)
    else:
        yield Finding("phases-add-up", "ok", f"{text}, within the noise of these processes")


def _measures(start: Start) -> Iterator[Finding]:
    for measure in measures_for(start):
        ms = start.initialisation.ms(*measure.phases)
        if ms >= WORTH_TELLING * start.total_ms:
            what = " and ".join(TITLES[name] for name in measure.phases if start.initialisation.ms(name))
            share = f"{ms:.0f} ms of {start.total_ms:.0f} ms to the first result"
            text = f"{what}: {share}; most of that is saved by {measure.does}"
            yield Finding(measure.code, "advice", text, measure.hint, saves_ms=ms)


def _first_run(start: Start) -> Iterator[Finding]:
    ms = start.first_extra_ms
    if ms < WORTH_TELLING * start.total_ms:
        return
    text = f"the first run takes {ms:.0f} ms longer than later ones ({start.steady_ms:.1f} ms)"
    if start.on_gpu:
        text = f"{text}: kernels are loaded, convolutions planned, memory pools grown"
        yield Finding("first-run-takes-long", "advice", text, _TUNE, saves_ms=ms)
    else:
        text = f"{text}: memory is touched for the first time"
        hint = "answer requests only after a warm-up run: load(bundle, check='golden')   (docs/loading.md)"
        yield Finding("first-run-takes-long", "advice", text, hint)
