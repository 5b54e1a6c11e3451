"""`doctor options MODEL`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.bundle.codec import encode
from pipeline.diagnose.alone import alone_on
from pipeline.diagnose.diagnosis import Cell, Diagnosis, Finding, Severity, Table, diagnose
from pipeline.diagnose.subject import DEFAULT, PREPARED, Subject
from pipeline.diagnose.variations.contenders import Contender, build_contenders
from pipeline.diagnose.variations.verdict import (
    MEASURES,
    TITLES,
    Comparison,
    Results,
    compare,
    find_in_comparison,
)
from pipeline.measuring.comparison import summarise
from pipeline.measuring.device_lock import CPU_DEVICE
from pipeline.measuring.rounds import run_rounds
from pipeline.runtime.probe import ProbeResult, measure_plan

ROUNDS = 5
_TIMEOUT_S = 6 * 3600.0


def diagnose_options(subject: Subject, *, device: str = CPU_DEVICE, rounds: int = ROUNDS) -> Diagnosis:
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
    with alone_on(device), tempfile.TemporaryDirectory(prefix="ortprep-options-") as folder:
        contenders, skipped = build_contenders(subject, device, Path(folder))
        by_name = {contender.name: contender for contender in contenders}

        def measure(name: str) -> ProbeResult:
            return measure_plan(by_name[name].request, timeout_s=_TIMEOUT_S)

        # A first round brings every file into the page cache, and does not count.
        warm = run_rounds(tuple(by_name), rounds=1, measure=measure)
        outcome = run_rounds(tuple(warm.results), rounds=rounds, measure=measure)
    failures = {**skipped, **warm.failures, **outcome.failures}
    comparisons = compare(outcome.results)
    return diagnose(
        "options",
        [
            *find_in_comparison(comparisons, prepared=subject.bundle is not None),
            *(_failed(name, reason) for name, reason in failures.items()),
        ],
        subject=subject.name,
        tables=[_table(contenders, outcome.results, comparisons, device)],
        figures={
            "device": device,
            "results": encode(dict(outcome.results)),
            "comparisons": encode(comparisons),
            "failures": failures,
        },
    )


def _failed(name: str, reason: str) -> Finding:
    severity: Severity = "problem" if name in (DEFAULT, PREPARED) else "note"
    return Finding("cannot-be-loaded", severity, f"{name}: {' '.join(reason.split())}")


def _table(
    contenders: Sequence[Contender],
    results: Results,
    comparisons: Mapping[str, Mapping[str, Comparison]],
    device: str,
) -> Table:
    rounds = max((len(own) for own in results.values()), default=0)
    columns = ("way", *TITLES.values(), "first result, of default's", "larger than noise", "what")
    rows = tuple(
        _row(contender, results[contender.name], comparisons.get(contender.name, {}))
        for contender in contenders
        if contender.name in results
    )
    return Table(f"ways to load it on {device}, medians of {rounds} processes each", columns, rows)


def _row(
    contender: Contender, own: Sequence[ProbeResult], compared: Mapping[str, Comparison]
) -> tuple[Cell, ...]:
    spreads = []
    for value in MEASURES.values():
        summary = summarise([value(one) for one in own])
        spreads.append(f"{summary.median:.4g} ± {(summary.p75 - summary.p25) / 2:.2g}")
    first = compared.get("first_result_ms")
    ratio = "–" if first is None else f"{first.ratio:.2f}×"
    verdict = "–" if first is None else {"less": "yes", "more": "yes"}.get(first.verdict, first.verdict)
    return (contender.name, *spreads, ratio, verdict, contender.what)
