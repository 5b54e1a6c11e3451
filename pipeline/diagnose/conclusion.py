"""What all checks together come to, in plain words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.diagnose.diagnosis import SEVERITIES, Diagnosis, Finding

_MOST = 6
_WORTH_A_STEP = ("problem", "advice")


def conclude(diagnoses: Sequence[Diagnosis], *, subject: str) -> Diagnosis:
    """Returns what dominates, what to do first and what it would save, each with the figure behind it.

    Args:
        diagnoses: What the checks came to.
        subject: The model.
    """
    by_check = {one.check: one for one in diagnoses}
    findings = (*_dominating(by_check), *_steps(diagnoses))
    nothing = Finding("nothing-found", "good", "nothing to mend or gain")
    return Diagnosis("all", subject, findings or (nothing,))


def _dominating(checks: Mapping[str, Diagnosis]) -> Iterator[Finding]:
    figures: Mapping[str, Any] = checks["init"].figures if "init" in checks else {}
    start = figures.get("default") or figures.get("prepared")
    if not start:
        return
    parts = {
        "making the session": start["init_ms"],
        "importing numpy and ONNX Runtime": start["numpy_ms"] + start["onnxruntime_ms"],
        "what only the first run takes": start["first_extra_ms"],
    }
    name = max(parts, key=lambda part: parts[part])
    text = f"what dominates: {name}, {parts[name]:.0f} ms of {start['total_ms']:.0f} ms to the first result"
    saved = start["saved_by_ms"]
    if name == "making the session" and saved:
        most = max(saved, key=lambda code: saved[code])
        text += f"; most of it is {most.replace('-', ' ')}, {saved[most]:.0f} ms"
    yield Finding("what-dominates", "note", text)


def _steps(diagnoses: Sequence[Diagnosis]) -> Iterator[Finding]:
    """Yields what can be done, the most severe first; what the same step mends or gains is told together."""
    steps: dict[str, list[tuple[str, Finding]]] = {}
    for diagnosis in diagnoses:
        for finding in diagnosis.findings:
            if finding.hint is not None and finding.severity in _WORTH_A_STEP:
                steps.setdefault(finding.hint, []).append((diagnosis.check, finding))
    ordered = sorted(steps.items(), key=lambda step: -max(_rank(finding) for _, finding in step[1]))
    for number, (hint, reasons) in enumerate(ordered[:_MOST], 1):
        text = "; ".join(f"{check}: {finding.text}" for check, finding in reasons)
        worst = max((finding for _, finding in reasons), key=_rank)
        yield Finding(f"step-{number}", worst.severity, text, hint)


def _rank(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)
