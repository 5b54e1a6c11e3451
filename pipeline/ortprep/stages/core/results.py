"""Results of the stages, which later stages read; kept as JSON in receipts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.conversion_record import ConversionRecord, OutputAccuracy
from ortprep.bundle.loader_config import TensorSpec, Variant
from ortprep.bundle.manifest import (
    Decision,
    LadderAttempt,
    MeasurementRecord,
    SourceRecord,
    VerificationRecord,
)
from ortprep.bundle.session_record import SessionPlan
from ortprep.bundle.tuning_record import TuningRecord


@dataclass(frozen=True)
class ModelInterface:
    """What can be said of a model without running it.

    Attributes:
        inputs: Inputs that have no initializer, in graph order.
        index_bounds: Exclusive upper bound of integer inputs that index an initializer, by input name.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    index_bounds: Mapping[str, int]
    external: bool


@dataclass(frozen=True)
class FetchResult:
    """Of `fetch`. Files: the model and its external data, with the relative paths the model gives them.

    Attributes:
        model: Path of the model file in the stage's folder.
        config: Text of the `config.json` that came along with a model of the Hub, None without one.
    """

    model: str
    source: SourceRecord
    interface: ModelInterface
    config: str | None = None


@dataclass(frozen=True)
class ConvertResult:
    """Of `convert`. Files: the converted model and its weights, as `fetch` leaves a source."""

    converted: FetchResult
    record: ConversionRecord


@dataclass(frozen=True)
class PreparedResult:
    """Of `optimize` and `tune`: how jobs load a variant. Files: the model, and what its sessions read.

    Attributes:
        variant: The variant as the bundle will record it, with paths in the stage's folder, and without the
            files and the golden sample that `package` adds.
        step: Ladder step of its graph, as `Step.name` lists them.
        ladder: Every step that `optimize` tried, the taken one last.
        onnxruntime: ONNX Runtime version that wrote it.
        record: The search for its plan; None of `optimize`.
    """

    variant: Variant
    step: str
    ladder: tuple[LadderAttempt, ...]
    onnxruntime: str
    record: TuningRecord | None = None

    def plan_in(self, folder: Path) -> SessionPlan:
        """Returns the session that jobs make, of the files in a folder."""
        own = self.variant
        return SessionPlan(str(folder / own.model), own.session_options, own.providers)


@dataclass(frozen=True)
class VerifyResult:
    """Of `verify`.

    Files of the one task that runs the source (see `verify.reference`): the reference, its samples, and
    `golden.npz` with arrays `input:NAME` and `output:NAME`. A converted variant's task leaves a `golden.npz`
    of its own: an input that fits it, and what it answers. The others leave none.

    Attributes:
        accuracy: Of a converted variant, per output, against the unconverted source.
    """

    record: VerificationRecord
    accuracy: tuple[OutputAccuracy, ...] = ()


@dataclass(frozen=True)
class MeasureResult:
    """Of `measure`. No files.

    Attributes:
        fallback: Which plan the portable variant ships; None where it was not measured with this one.
    """

    measurements: tuple[MeasurementRecord, ...]
    decision: Decision
    fallback: Decision | None = None
