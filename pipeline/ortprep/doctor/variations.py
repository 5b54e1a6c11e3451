"""`doctor options MODEL`: ways to load a model that people compare by hand, compared beyond the noise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from ortprep.bundle.codec import encode
from ortprep.bundle.figures import Samples
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child, scratch_folder
from ortprep.children.probe import ProbeRequest, ProbeResult
from ortprep.doctor.diagnosis import Diagnosis, Finding, diagnose
from ortprep.doctor.doctor_model import (
    CHILD_TIMEOUT_S,
    DEFAULT,
    PREPARE,
    PREPARED,
    DoctorModel,
    guard_device,
    measure_loads,
    plan_of_bundle,
    plan_on,
    variant_for,
)
from ortprep.errors import PipelineError
from ortprep.measuring.comparison import MIN_ROUNDS, is_below, paired_ratio
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.options import with_external_data
from ortprep.runtime.loading.session import build_session
from ortprep.tables import CellValue, Table, fill_table

ROUNDS = 5
STEADY_S = 0.2

_FIRST_GPU = "cuda:0"
_NO_PREPACKING = {"session.disable_prepacking": "1"}
_HEURISTIC = {"cudnn_conv_algo_search": "HEURISTIC"}
_WORTH = 0.95
_STEADY_ALLOWANCE = 1.03

Verdict: TypeAlias = Literal["less", "more", "within the noise", "too few rounds"]
Results: TypeAlias = Mapping[str, Sequence[ProbeResult]]
"""By way, one result a round, the k-th of all from the same round."""

MEASURES = ("init_ms", "first_result_ms", "steady_ms", "private_mb")
"""Figures of a `ProbeResult` that are compared."""


class LoadVariation(NamedTuple):
    """A way to load a model.

    Attributes:
        name: In a word or two.
        what: Its difference from the default.
        request: Request of its processes.
    """

    name: str
    what: str
    request: ProbeRequest


class VariationComparison(NamedTuple):
    """One way against the default in one measure.

    Attributes:
        ratio: Its figure relative to the default's, paired by rounds.
        verdict: Whether that is larger than noise.
    """

    ratio: float
    verdict: Verdict


Comparisons: TypeAlias = Mapping[str, Mapping[str, VariationComparison]]
"""Every way but the default, by measure."""


def diagnose_options(subject: DoctorModel, *, device: str = CPU_DEVICE, rounds: int = ROUNDS) -> Diagnosis:
    """Compares ways to load a model, interleaved, in fresh processes, with a warm page cache.

    The optimised copies are written for the comparison and gone after it; their answers are not verified.

    Args:
        subject: The model; a bundle of it takes part as jobs load it.
        device: `cpu` or `cuda:<ordinal>`.
        rounds: Fresh processes per way; with fewer than three nothing is said of noise.

    Raises:
        BundleError: The bundle cannot be read.
        LoadError: None of its variants is for the device.
        StageError: The folder of the device's lock cannot be trusted.
        OSError: The disk is full.
    """
    with guard_device(device), scratch_folder("ortprep-options-") as folder:
        variations, skipped = build_variations(subject, device, folder)
        runs = measure_loads({one.name: one.request for one in variations}, rounds=rounds)
    failures = {**skipped, **runs.failures}
    comparisons = compare(runs.rounds)
    measured = [variation for variation in variations if variation.name in runs.rounds]
    failed = (
        Finding(
            "cannot-be-loaded",
            "problem" if name in (DEFAULT, PREPARED) else "note",
            f"{name}: {' '.join(reason.split())}",
        )
        for name, reason in failures.items()
    )
    return diagnose(
        "options",
        [*find_in_comparison(comparisons, prepared=subject.bundle is not None), *failed],
        subject=subject.name,
        tables=[_table(measured, runs.rounds, comparisons, device)],
        figures={
            "device": device,
            "results": encode(dict(runs.rounds)),
            "comparisons": encode(comparisons),
            "failures": failures,
        },
    )


def build_variations(
    subject: DoctorModel, device: str, folder: Path
) -> tuple[tuple[LoadVariation, ...], Mapping[str, str]]:
    """Returns the ways to load a model, the default first, and those that cannot be tried, with the reason.

    Raises:
        BundleError: The bundle cannot be read.
        LoadError: None of its variants is for the device.
        OSError: The folder cannot be written to.
    """
    variations: list[LoadVariation] = []
    skipped: dict[str, str] = {}
    if subject.source is not None:
        plans = list(_plans_of_source(subject.source, device))
        try:
            run_child(
                write_optimised, _writing_plan(subject.source, device, folder), timeout_s=CHILD_TIMEOUT_S
            )
            plans += _plans_of_optimised(folder / "mapped.onnx", device)
        except PipelineError as error:
            skipped["mapped"] = error.message
        variations += [
            LoadVariation(name, what, ProbeRequest(plan, subject.sample, STEADY_S))
            for name, what, plan in plans
        ]
    if subject.bundle is not None:
        variations.append(_prepared(Path(subject.bundle), device, subject.sample))
    return tuple(variations), skipped


def _prepared(bundle: Path, device: str, sample: str) -> LoadVariation:
    """Returns how a bundle is loaded: by `load`, or on a further GPU by the session that it records."""
    variant = variant_for(bundle, device)
    if device in (CPU_DEVICE, _FIRST_GPU):
        request = ProbeRequest(None, sample, STEADY_S, bundle=str(bundle), target=variant.name)
        what = f"the bundle's {variant.name}, by `load`"
    else:
        request = ProbeRequest(plan_of_bundle(bundle, device), sample, STEADY_S)
        what = f"the session that the bundle's {variant.name} records"
    return LoadVariation(PREPARED, what, replace(request, io_binding=variant.io_binding))


def _plans_of_source(source: str, device: str) -> Iterator[tuple[str, str, SessionPlan]]:
    yield DEFAULT, "plain ONNX Runtime, everything optimised at load", plan_on(source, device)
    unoptimised = plan_on(source, device, level="ORT_DISABLE_ALL")
    yield "no optimisation", "the source as it is, ORT_DISABLE_ALL", unoptimised
    if device != CPU_DEVICE:
        plan = plan_on(source, device, provider_options=_HEURISTIC)
        yield "heuristic", "cudnn_conv_algo_search=HEURISTIC", plan


def _plans_of_optimised(model: Path, device: str) -> Iterator[tuple[str, str, SessionPlan]]:
    plan = plan_on(str(model), device, level="ORT_DISABLE_ALL")
    yield "mapped", "optimised graph, weights in a mapped file, ORT_DISABLE_ALL", plan
    unpacked = plan_on(str(model), device, level="ORT_DISABLE_ALL", config_entries=_NO_PREPACKING)
    yield "mapped, no prepacking", "the same with session.disable_prepacking=1", unpacked


def _writing_plan(source: str, device: str, folder: Path) -> SessionPlan:
    """Returns the plan of the session that writes the optimised model, `mapped.onnx`, into a folder."""
    model = folder / "mapped.onnx"
    plan = plan_on(source, device, config_entries={**_NO_PREPACKING, **with_external_data(model)})
    options = plan.session_options._replace(attributes={"optimized_model_filepath": str(model)})
    return plan._replace(session_options=options)


def write_optimised(plan: SessionPlan) -> None:
    """Makes the session that writes an optimised model; runs in a child.

    Raises:
        LoadError: ONNX Runtime refuses the model, or cannot write.
        OSError: There is no room for it.
    """
    build_session(plan)
    # Else the kernel writes it out while the first rounds are measured.
    os.sync()


def compare(results: Results) -> dict[str, dict[str, VariationComparison]]:
    """Returns every way but the default against it, by measure; nothing without the default. Pure."""

    def one(name: str, measure: str) -> VariationComparison:
        own, default = ([getattr(one, measure) for one in results[way]] for way in (name, DEFAULT))
        verdict: Verdict = "within the noise"
        if len(own) < MIN_ROUNDS:
            verdict = "too few rounds"
        elif is_below(own, default):
            verdict = "less"
        elif is_below(default, own):
            verdict = "more"
        return VariationComparison(paired_ratio(own, default), verdict)

    others = [name for name in results if name != DEFAULT and results.get(DEFAULT)]
    return {name: {measure: one(name, measure) for measure in MEASURES} for name in others}


def find_in_comparison(comparisons: Comparisons, *, prepared: bool) -> tuple[Finding, ...]:
    """Returns what the comparison shows. Pure."""
    found = {comparison.verdict for way in comparisons.values() for comparison in way.values()}
    if found == {"too few rounds"}:
        text = f"too few rounds to tell a difference from noise; at least {MIN_ROUNDS} are needed"
        return (Finding("too-few-rounds", "note", text, "ortprep doctor options … --rounds 5"),)
    if not comparisons:
        text = "nothing to compare with: the default is the source model in plain ONNX Runtime"
        hint = "name the ONNX file or the spec, not the bundle alone"
        return (Finding("nothing-compared", "note", text, hint),)
    slower = {
        name: way["steady_ms"].ratio
        for name, way in comparisons.items()
        if way["steady_ms"].verdict == "more" and way["steady_ms"].ratio > _STEADY_ALLOWANCE
    }
    slower_runs = (
        Finding("slower-runs", "note", f"{name}: runs take {ratio:.2f}× the default's time, beyond the noise")
        for name, ratio in slower.items()
    )
    return (_soonest(comparisons, slower, prepared=prepared), *slower_runs)


def _soonest(comparisons: Comparisons, slower: Mapping[str, float], *, prepared: bool) -> Finding:
    """Returns which way gives its first result soonest without slower runs."""
    first = {name: way["first_result_ms"] for name, way in comparisons.items() if name not in slower}
    sooner = {name: one.ratio for name, one in first.items() if one.verdict == "less" and one.ratio < _WORTH}
    if not sooner:
        text = "no other way gives its first result sooner, beyond the noise, without slower runs"
        return Finding("default-is-as-good", "ok", text)
    best = min(sooner, key=lambda name: sooner[name])
    steady = comparisons[best]["steady_ms"]
    text = (
        f"{best}: first result {1 / sooner[best]:.1f}× sooner than the default, "
        f"runs {steady.ratio:.2f}× as long ({steady.verdict})"
    )
    if best == PREPARED:
        return Finding("prepared-is-soonest", "ok", text)
    hint = "ortprep tune   (searches for a better plan; docs/tuning.md)" if prepared else PREPARE
    return Finding("sooner-without-slower-runs", "advice", text, hint)


def _table(
    variations: Sequence[LoadVariation],
    results: Results,
    comparisons: Comparisons,
    device: str,
) -> Table:
    def samples(name: str) -> Callable[[LoadVariation], CellValue]:
        return lambda variation: Samples.of(getattr(one, name) for one in results[variation.name])

    def first(read: Callable[[VariationComparison], str]) -> Callable[[LoadVariation], CellValue]:
        figures = {name: read(way["first_result_ms"]) for name, way in comparisons.items()}
        return lambda variation: figures.get(variation.name)

    sizes = {"less": "yes", "more": "yes"}
    rounds = max(map(len, results.values()), default=0)
    return fill_table(
        f"ways to load it on {device}, medians of {rounds} processes each",
        variations,
        (
            ("way", lambda variation: variation.name),
            *((name.replace("_mb", " MB").replace("_", " "), samples(name)) for name in MEASURES),
            ("first result, of default's", first(lambda found: f"{found.ratio:.2f}×")),
            ("larger than noise", first(lambda found: sizes.get(found.verdict, found.verdict))),
            ("what", lambda variation: variation.what),
        ),
    )
