"""Is a converted model accurate enough? The gate of the spec, and the answers of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.children.answers import Answers
from ortprep.errors import SpecError
from ortprep.measuring.accuracy import compare_answers
from ortprep.measuring.gate import find_gate_failures
from ortprep.spec.conversion import ConvertSpec
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.inputs.samples import Sample
from ortprep.stages.core.user_metric import MetricRequest, metric_digest, run_user_metric


@dataclass(frozen=True)
class AccuracyResult:
    """Accuracy of every output, and the gate's failures, a line each."""

    outputs: tuple[OutputAccuracy, ...]
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the gate is passed."""
        return not self.failures


def gate_key(spec: ModelSpec) -> Mapping[str, Any]:
    """Returns what decides whether answers are accurate enough, for keys."""
    gate = convert_section(spec).gate
    digest = None if gate.metric is None else metric_digest(gate.metric, spec.folder)
    return {"gate": gate.model_dump(mode="json"), "metric": digest}


def judge_accuracy(
    spec: ModelSpec,
    samples: Sequence[Sample],
    *,
    expected: Answers,
    got: Answers,
    of_all: bool = True,
) -> AccuracyResult:
    """Compares all answers of a converted model with the source's, by the gate and by the user's own metric.

    Without `of_all`, the samples are a part, and thresholds over all of them are not applied.

    Raises:
        SpecError: The user's metric does not work.
        StageError: An answer's file is missing.
    """
    outputs = compare_answers(expected.samples, got.samples)
    gate = convert_section(spec).gate
    failures = list(find_gate_failures(gate.thresholds(of_all=of_all), outputs))
    if of_all and not failures and gate.metric is not None and gate.metric_at_least is not None:
        request = MetricRequest(
            gate.metric,
            spec.folder.resolve(),
            tuple(sample.path.resolve() for sample in samples),
            expected=expected.samples,
            got=got.samples,
        )
        value = run_user_metric(request, timeout_s=convert_section(spec).timeout_s)
        if not value >= gate.metric_at_least:
            failures.append(
                f"metric {gate.metric}: {value:.6g}, expected at least {gate.metric_at_least:.6g}"
            )
    return AccuracyResult(outputs, tuple(failures))


def convert_section(spec: ModelSpec) -> ConvertSpec:
    """Returns the section of a spec that converts.

    Raises:
        SpecError: It has none.
    """
    if spec.convert is None:
        raise SpecError(f"spec of {spec.name} converts nothing\n  expected a convert section, got none")
    return spec.convert
