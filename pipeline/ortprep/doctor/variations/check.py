"""`doctor options MODEL`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortprep.bundle.codec import encode
from ortprep.bundle.figures import Samples
from ortprep.children.probe import ProbeResult, measure_plan
from ortprep.children.scratch_folder import scratch_folder
from ortprep.doctor.diagnosis import Diagnosis, Finding, Severity, diagnose
from ortprep.doctor.doctor_model import DEFAULT, PREPARED, DoctorModel, guard_device
from ortprep.doctor.variations.load_variations import LoadVariation, build_variations
from ortprep.doctor.variations.verdict import (
    MEASURES,
    Results,
    VariationComparison,
    compare,
    find_in_comparison,
)
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.measuring.rounds import run_interleaved
from ortprep.tables import CellValue, Table

ROUNDS = 5
_TIMEOUT_S = 6 * 3600.0


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
        by_name = {variation.name: variation for variation in variations}

        def measure(name: str) -> ProbeResult:
            return measure_plan(by_name[name].request, timeout_s=_TIMEOUT_S)

        # A first round brings every file into the page cache, and does not count.
        warm = run_interleaved(tuple(by_name), measure, max_rounds=1)
        runs = run_interleaved(tuple(warm.rounds), measure, max_rounds=rounds)
    failures = {**skipped, **warm.failures, **runs.failures}
    comparisons = compare(runs.rounds)
    return diagnose(
        "options",
        [
            *find_in_comparison(comparisons, prepared=subject.bundle is not None),
            *(_failed(name, reason) for name, reason in failures.items()),
        ],
        subject=subject.name,
        tables=[_table(variations, runs.rounds, comparisons, device)],
        figures={
            "device": device,
            "results": encode(dict(runs.rounds)),
            "comparisons": encode(comparisons),
            "failures": failures,
        },
    )


def _failed(name: str, reason: str) -> Finding:
    severity: Severity = "problem" if name in (DEFAULT, PREPARED) else "note"
    return Finding("cannot-be-loaded", severity, f"{name}: {' '.join(reason.split())}")


def _table(
    variations: Sequence[LoadVariation],
    results: Results,
    comparisons: Mapping[str, Mapping[str, VariationComparison]],
    device: str,
) -> Table:
    rounds = max((len(own) for own in results.values()), default=0)
    headings = (name.replace("_mb", " MB").replace("_", " ") for name in MEASURES)
    columns = ("way", *headings, "first result, of default's", "larger than noise", "what")
    rows = tuple(
        _row(variation, results[variation.name], comparisons.get(variation.name, {}))
        for variation in variations
        if variation.name in results
    )
    return Table(f"ways to load it on {device}, medians of {rounds} processes each", columns, rows)


def _row(
    variation: LoadVariation, results: Sequence[ProbeResult], compared: Mapping[str, VariationComparison]
) -> tuple[CellValue, ...]:
    spreads = []
    for value in MEASURES.values():
        summary = Samples.of([value(result) for result in results])
        spreads.append(f"{summary.median:.4g} ± {(summary.p75 - summary.p25) / 2:.2g}")
    first = compared.get("first_result_ms")
    ratio = "–" if first is None else f"{first.ratio:.2f}×"
    verdict = "–" if first is None else {"less": "yes", "more": "yes"}.get(first.verdict, first.verdict)
    return (variation.name, *spreads, ratio, verdict, variation.what)
