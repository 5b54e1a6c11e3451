"""Conclusion from all checks, in plain words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ortprep.doctor.diagnosis import SEVERITIES, Diagnosis, Finding

_MAX_STEPS = 6


def conclude(diagnoses: Sequence[Diagnosis], *, subject: str) -> Diagnosis:
    """Returns what dominates, what to do first and what it would save, each with the figure behind it."""
    by_check = {diagnosis.check: diagnosis for diagnosis in diagnoses}
    findings = (*_dominating(by_check), *_steps(diagnoses))
    nothing = Finding("nothing-found", "ok", "nothing to fix or gain")
    return Diagnosis("all", subject, findings or (nothing,))


def _dominating(checks: Mapping[str, Diagnosis]) -> Iterator[Finding]:
    figures: Mapping[str, Any] = checks["init"].figures if "init" in checks else {}
    start = figures.get("default") or figures.get("prepared")
    if not start:
        return
    parts = {
        "making the session": start["init_ms"],
        "importing numpy and ONNX Runtime": start["numpy_ms"] + start["onnxruntime_ms"],
        "what the first run takes beyond later ones": start["first_extra_ms"],
    }
    name = max(parts, key=lambda part: parts[part])
    text = f"what dominates: {name}, {parts[name]:.0f} ms of {start['total_ms']:.0f} ms to the first result"
    saved = start["saved_by_ms"]
    largest = max(saved, key=lambda code: saved[code], default="")
    if name == "making the session" and largest and saved[largest] >= parts[name] / 2:
        text += f"; most of it is {largest.replace('-', ' ')}, {saved[largest]:.0f} ms"
    yield Finding("what-dominates", "note", text)


def _steps(diagnoses: Sequence[Diagnosis]) -> Iterator[Finding]:
    """Yields every problem and what can be done, the most severe first, then what saves most."""
    steps: dict[str, list[tuple[str, Finding]]] = {}
    for diagnosis in diagnoses:
        for finding in diagnosis.findings:
            if finding.severity == "problem" or (finding.severity == "advice" and finding.hint is not None):
                steps.setdefault(finding.hint or finding.text, []).append((diagnosis.check, finding))
    ordered = sorted(steps.values(), key=_weight, reverse=True)
    for reasons in ordered[:_MAX_STEPS]:
        worst = max((finding for _, finding in reasons), key=_rank)
        text = "; ".join(f"{check}: {finding.text}" for check, finding in reasons)
        yield replace(worst, text=text, saves_ms=_saves_ms(reasons) or None)
    if len(ordered) > _MAX_STEPS:
        yield Finding(
            "more-steps", "note", f"{len(ordered) - _MAX_STEPS} smaller steps are among the checks' findings"
        )


def _weight(reasons: Sequence[tuple[str, Finding]]) -> tuple[int, float]:
    return max(_rank(finding) for _, finding in reasons), _saves_ms(reasons)


def _saves_ms(reasons: Sequence[tuple[str, Finding]]) -> float:
    return sum(finding.saves_ms or 0.0 for _, finding in reasons)


def _rank(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)
