"""Results of the stages, which later stages read; kept as JSON in receipts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.conversion_record import ConversionRecord, OutputAccuracy
from ortprep.bundle.loader_config import Variant
from ortprep.bundle.manifest import (
    Decision,
    LadderAttempt,
    MeasurementRecord,
    SourceRecord,
    VerificationRecord,
)
from ortprep.bundle.model_facts import ModelInterface
from ortprep.bundle.session_record import SessionPlan
from ortprep.bundle.tuning_record import TuningRecord


@dataclass(frozen=True)
class FetchResult:
    """Result of `fetch` and `convert`.

    Files: the model and its external data, where the model looks for them.

    Attributes:
        model: Path of the model file in the stage's folder.
        conversion: Record of its conversion, None for the source.
    """

    model: str
    source: SourceRecord
    interface: ModelInterface
    conversion: ConversionRecord | None = None


@dataclass(frozen=True)
class PreparedResult:
    """Result of `optimize` and `tune`: how jobs load a variant.

    Files: the model, and what its sessions read.

    Attributes:
        variant: The variant as the bundle will record it, with paths in the stage's folder, and without the
            files and the golden sample that `package` adds.
        step: The step that wrote its graph, as `Step.name` lists them.
        attempts: Every step that `optimize` tried, the taken one last.
        onnxruntime: ONNX Runtime version that wrote it.
        record: The search for its plan; None of `optimize`.
    """

    variant: Variant
    step: str
    attempts: tuple[LadderAttempt, ...]
    onnxruntime: str
    record: TuningRecord | None = None


def session_of(folder: Path, variant: Variant) -> SessionPlan:
    """Returns the session that jobs make of a variant whose files are in a folder."""
    return SessionPlan(str(folder / variant.model), variant.session_options, variant.providers)


@dataclass(frozen=True)
class VerifyResult:
    """Result of `verify`.

    Files of the one task that runs the source (see `verify.reference`): the reference, its samples, and
    `golden.npz` with arrays `input:NAME` and `output:NAME`. A converted variant's task leaves a `golden.npz`
    of its own: an input that fits it, and what it answers. The others leave none.

    Attributes:
        accuracy: Accuracy of a converted variant, per output, against the unconverted source.
    """

    record: VerificationRecord
    accuracy: tuple[OutputAccuracy, ...] = ()


@dataclass(frozen=True)
class MeasureResult:
    """Result of `measure`. No files.

    Attributes:
        fallback: Plan that the portable variant ships; None where it was not measured with this one.
    """

    measurements: tuple[MeasurementRecord, ...]
    decision: Decision
    fallback: Decision | None = None
