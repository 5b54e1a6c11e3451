"""The manifest's record of a variant's conversion, which comes before its graph is optimised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OutputAccuracy:
    """Accuracy of one output against its reference, over all samples.

    Attributes:
        output: Name of the output.
        elements: Elements compared, over all samples.
        max_abs: Largest absolute difference of elements that are finite on both sides.
        snr_db: Signal-to-noise ratio in decibels, at most 200 in size; the worst sample's.
        top1: Share of rows along the last axis whose largest element is at the same index; of integers,
            booleans and strings the share of equal elements; None where an output has no rows.
        nonfinite: Elements where NaN, or an infinity of one sign, is on one side only.
        reason: Difference of type or shape; "" for none.
    """

    output: str
    elements: int = 0
    max_abs: float = 0.0
    snr_db: float = 200.0
    top1: float | None = None
    nonfinite: int = 0
    reason: str = ""


@dataclass(frozen=True)
class SampleSet:
    """Real inputs: how many, and the digest of the list of their digests. The inputs stay with the spec."""

    count: int
    digest: str


@dataclass(frozen=True)
class ApplicationVerdict:
    """What an application answered with converted models, beside what it answers without.

    Attributes:
        program: Name of the program; its arguments may be secrets.
        compared: What was compared: `stdout`, a file, or a function.
        agreement: From 0 to 1; of lines the share that is equal.
        min_agreement: What the spec requires.
        lines: Number of lines that were compared; 0 for a function.
        equal: Number of those that were equal.
        plain_s: Seconds of the program's run without bundles.
        run_s: Seconds of its run with them.
        reason: Why it does not count, whatever the agreement; "" if it does.
    """

    program: str
    compared: str
    agreement: float
    min_agreement: float
    lines: int = 0
    equal: int = 0
    plain_s: float = 0.0
    run_s: float = 0.0
    reason: str = ""

    @property
    def holds(self) -> bool:
        """Whether the answers are near enough."""
        return not self.reason and self.agreement >= self.min_agreement

    def __str__(self) -> str:
        """Returns a sentence: `app.py: 8.3 → 5.1 s, 104 of 104 lines of stdout the same`."""
        if self.reason:
            return f"{self.program}: {self.reason}"
        same = f"{self.equal} of {self.lines} lines of {self.compared} the same"
        if not self.lines:
            same = f"agreement {self.agreement:.4g} by {self.compared}"
        expected = "" if self.holds else f", expected at least {self.min_agreement:.4g}"
        return f"{self.program}: {self.plain_s:.1f} → {self.run_s:.1f} s, {same}{expected}"


@dataclass(frozen=True)
class PrecisionStep:
    """One step of the ladder of precisions that was tried.

    Attributes:
        precision: The precision of this step.
        outcome: `taken`, or why the ladder went on.
        kept: Nodes that stayed in fp32, by name.
        nodes: Nodes of the graph before it was converted.
        trials: Sets of nodes that the search asked about; 0 without a search.
        accuracy: Per output, against the unconverted source; empty if it could not be run.
        made_by: The pass that converted: `fp16`, `bf16`, `int8-dynamic`, `int8-static`, `int8-weights` or
            `int4-weights`; "" if it refused the model.
    """

    precision: str
    outcome: str
    kept: tuple[str, ...] = ()
    nodes: int = 0
    trials: int = 0
    accuracy: tuple[OutputAccuracy, ...] = ()
    made_by: str = ""


@dataclass(frozen=True)
class ConversionRecord:
    """The result of `convert` for one variant, its parents' part included.

    Attributes:
        asked: Precision that the spec asks for.
        precision: Precision that the variant has.
        fused: Operators that replaced subgraphs, with their number.
        fused_by: Package and version that fused; "" for none.
        steps: Every step of the ladder that was tried, the taken one last.
        gate: Thresholds that are set, by output, "" for those without any of their own.
        calibration: Inputs that ranges of activations were learned from; None for none.
        judged_on: The spec's own samples that the answers were judged on; None for none.
        verdict: What the application answered with the packaged bundle; None where the spec has no judge.
    """

    asked: str
    precision: str
    fused: Mapping[str, int] = field(default_factory=dict)
    fused_by: str = ""
    steps: tuple[PrecisionStep, ...] = ()
    gate: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    calibration: SampleSet | None = None
    judged_on: SampleSet | None = None
    verdict: ApplicationVerdict | None = None


def computes_with_integers(record: ConversionRecord | None) -> bool:
    """Returns whether products are computed with 8-bit integers, whose instructions differ between CPUs."""
    last_step = record.steps[-1] if record is not None and record.steps else None
    return last_step is not None and last_step.made_by in ("int8-dynamic", "int8-static")


@dataclass(frozen=True)
class LeftOut:
    """A variant that the spec asks for and the bundle does not have.

    Attributes:
        variant: Its name.
        reason: The reason, in a sentence.
        conversion: Record of the attempts; None for a variant that was to be made of one that was left out.
    """

    variant: str
    reason: str
    conversion: ConversionRecord | None = None
