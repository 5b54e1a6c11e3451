"""Is a converted model accurate enough? What the spec's gate asks, and what a session answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.bundle.conversion_record import OutputAccuracy
from pipeline.errors import SpecError, StageError
from pipeline.measuring.accuracy import compare_answers
from pipeline.measuring.gate import Gate, Thresholds, judge
from pipeline.runtime.answers import Answers
from pipeline.spec import conversion
from pipeline.spec.models import ModelSpec
from pipeline.stages.convert.user_metric import metric_digest, run_user_metric
from pipeline.stages.inputs.samples import Sample


@dataclass(frozen=True)
class Judgement:
    """What came of comparing a converted model's answers with the source's.

    Attributes:
        outputs: Figures of every output.
        failures: What the gate says against them, a line each; none if it is passed.
    """

    outputs: tuple[OutputAccuracy, ...]
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the gate is passed."""
        return not self.failures


def gate_of(spec: ModelSpec) -> Gate:
    """Returns the thresholds of a spec that converts."""
    given = _section(spec).gate
    return Gate(_thresholds(given), {name: _thresholds(own) for name, own in given.outputs.items()})


def gate_key(spec: ModelSpec) -> Mapping[str, Any]:
    """Returns what decides whether answers are accurate enough, as JSON types, for keys."""
    gate = _section(spec).gate
    digest = None if gate.metric is None else metric_digest(gate.metric, spec.folder)
    return {"gate": gate.model_dump(mode="json"), "metric": digest}


def judge_accuracy(
    spec: ModelSpec, samples: Sequence[Sample], *, expected: Answers, got: Answers
) -> Judgement:
    """Compares all answers of a converted model with the source's, by the gate and by the user's own metric.

    Args:
        spec: The gate.
        samples: The inputs.
        expected: What the unconverted source answers.
        got: What the converted model answers.

    Raises:
        SpecError: The user's metric does not work.
        StageError: An answer's file is gone.
    """
    outputs = compare_answers(expected.samples, got.samples)
    gate = _section(spec).gate
    failures = list(judge(gate_of(spec), outputs).failures)
    if gate.metric is not None and gate.metric_at_least is not None:
        value = _ask_metric(spec, gate.metric, samples, expected=expected, got=got)
        if not value >= gate.metric_at_least:
            failures.append(
                f"metric {gate.metric}: {value:.6g}, expected at least {gate.metric_at_least:.6g}"
            )
    return Judgement(outputs, tuple(failures))


def _ask_metric(
    spec: ModelSpec, metric: str, samples: Sequence[Sample], *, expected: Answers, got: Answers
) -> float:
    try:
        return run_user_metric(
            metric,
            folder=spec.folder,
            samples=[sample.path for sample in samples],
            expected=expected.samples,
            got=got.samples,
            timeout_s=_section(spec).timeout_s,
        )
    except StageError as error:
        # It is the user's to mend: no precision would do better, and no ladder may hide it.
        raise SpecError(error.message, hint=error.hint) from error


def _section(spec: ModelSpec) -> conversion.Convert:
    if spec.convert is None:
        raise SpecError(f"spec of {spec.name} converts nothing\n  expected a section convert, got none")
    return spec.convert


def _thresholds(given: conversion.Thresholds) -> Thresholds:
    return Thresholds(
        max_abs=given.max_abs,
        mean_abs=given.mean_abs,
        cosine=given.cosine,
        snr_db=given.snr_db,
        top1=given.top1,
    )
