"""The spec that a user writes: `configs/NAME.yaml`, validated, and its JSON Schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema

from ortprep.bundle.loader_config import Tolerance
from ortprep.bundle.manifest import OutputError
from ortprep.options import NEWEST, Option, format_option, known_options
from ortprep.spec.conversion import ConvertSpec
from ortprep.spec.fields import (
    Glob,
    Name,
    NotNegative,
    Number,
    Positive,
    ScalarOption,
    Seconds,
    Sha256,
    Shape,
    SpecSection,
    Target,
    Text,
    Url,
    check_each_once,
)


class SourceSpec(SpecSection):
    """Source of the model: either `path` or `url`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [kind]} for kind in ("path", "url")]})

    path: Text | None = None
    """Local file, relative to the spec."""
    url: Url | None = None
    """hf://ORG/REPO@REVISION/PATH.onnx: a file on the Hub, read with the login of the Hub's client."""
    sha256: Sha256 | None = None
    """Digest of the model file; the build fails if it differs. Recorded if not given."""
    data_sha256: dict[Text, Sha256] = Field(default_factory=dict)
    """Digests of the files of external data, by their paths below the model's folder; with `sha256`, each
    file needs one."""
    drop_zip_map: bool = False
    """Whether the bundle of a classifier that ends with a `ZipMap` returns its matrix, with a column per
    class, instead of a list of maps, which no bundle can return."""

    @model_validator(mode="after")
    def _exactly_one(self) -> SourceSpec:
        if (self.path is None) == (self.url is None):
            raise ValueError(f"expected either path or url, got {'none' if self.path is None else 'both'}")
        return self


class InputSpec(SpecSection):
    """Shapes and values that production sends for one input."""

    shapes: tuple[Shape, ...] = Field(default=(), max_length=1000)
    """Shapes to verify and measure; the first is the primary one; [] is a scalar. Static models need none.
    The element type is the model's own and is never written here."""
    range: tuple[Number, Number] | None = None
    """Lowest and highest value of seeded inputs, both included. Without range and values: floats are standard
    normal, booleans true or false, integers that index a table of the model any of its rows, 8-bit integers
    any value, other integers 0 or 1."""
    values: tuple[ScalarOption, ...] | None = Field(default=None, min_length=1)
    """The only values of seeded inputs; required for string inputs."""

    @field_validator("range")
    @classmethod
    def _ordered(cls, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        if ends is not None and ends[0] > ends[1]:
            raise ValueError(f"expected [low, high], got {list(ends)}")
        return ends

    @model_validator(mode="after")
    def _range_or_values(self) -> InputSpec:
        if self.range is not None and self.values is not None:
            raise ValueError("expected range or values, got both")
        return self


DEFAULT_TOLERANCE = Tolerance(1e-3, 1e-5)

NOISE_MARGIN = 2.0
"""How many times the noise floor a difference may be and still be called noise."""

MOST_NOISE = 1e-3
"""The largest noise floor, relative to the output's largest value, that still looks like rounding."""


class ToleranceSpec(SpecSection):
    """Tolerance of one output."""

    rtol: NotNegative
    """Relative tolerance."""
    atol: NotNegative
    """Absolute tolerance."""


class VerifySpec(SpecSection):
    """Tolerance of a prepared model's answers: |got − expected| ≤ atol + rtol · |expected|."""

    rtol: NotNegative | None = None
    """Relative tolerance; 1e-3 if not given."""
    atol: NotNegative | None = None
    """Absolute tolerance; 1e-5 if not given. If neither is given, as many elements may be further off as ONNX
    Runtime's own optimisation moves, and as far, twice, where that is rounding."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the generated inputs."""
    outputs: Mapping[str, ToleranceSpec] = Field(default_factory=dict)
    """Tolerances by output name."""

    @property
    def allows_rounding(self) -> bool:
        """Whether rounding may exceed the tolerance of outputs without their own: the spec sets none."""
        return self.rtol is None and self.atol is None

    def key(self) -> dict[str, Any]:
        """Returns what decides whether answers are right, defaults included, as JSON types."""
        default = self.tolerances()[""]
        effective = {"rtol": default.rtol, "atol": default.atol, "allows_rounding": self.allows_rounding}
        return self.model_dump(mode="json") | effective

    def tolerances(self, noise_floor: Iterable[OutputError] = ()) -> dict[str, Tolerance]:
        """Returns the tolerances by output, "" for outputs without their own.

        Args:
            noise_floor: How far ONNX Runtime's own optimisation moves each output of the source: what plain
                ONNX Runtime answers. A tolerance that the spec sets is not widened by it.
        """
        rtol = DEFAULT_TOLERANCE.rtol if self.rtol is None else self.rtol
        atol = DEFAULT_TOLERANCE.atol if self.atol is None else self.atol
        tolerances = {"": Tolerance(rtol, atol)}
        for noise in noise_floor if self.allows_rounding else ():
            if NOISE_MARGIN * noise.ratio > 1 and noise.max_abs <= MOST_NOISE * noise.largest:
                tolerances[noise.output] = Tolerance(
                    rtol, atol, NOISE_MARGIN * noise.max_abs, NOISE_MARGIN * noise.share
                )
        return tolerances | {name: Tolerance(own.rtol, own.atol) for name, own in self.outputs.items()}


class OptimizeSpec(SpecSection):
    """The one-time graph optimisation."""

    level: Literal["all", "extended", "basic"] = "all"
    """The first level to try."""
    timeout_s: Seconds = 3600.0
    """Deadline of one optimisation, in seconds."""


def _field_of(option: Option) -> Any:
    """Returns the field of a session option: its type, what its value must be, and its description."""
    kinds: dict[str, Any] = {"switch": bool, "integer": int, "text": str}
    kind = kinds.get(option.kind) or Literal[option.values]

    def check(value: bool | int | str) -> bool | int | str:
        if not option.accepts(format_option(value)):
            raise ValueError(f"expected {option.expected}")
        return value

    return Annotated[kind, AfterValidator(check)] | None, Field(default=None, description=option.effect)


_ATTRIBUTES = {
    option.name: _field_of(option) for option in known_options("attribute", NEWEST) if option.owner is None
}
_AttributesSpec: Any = create_model("_AttributesSpec", __base__=SpecSection, **_ATTRIBUTES)


class RuntimeSpec(_AttributesSpec, SpecSection):  # type: ignore[misc]  # a class that pydantic makes
    """Options of the session that jobs get; they are checked against the installed ONNX Runtime's."""

    session_config: Mapping[str, ScalarOption] = Field(default_factory=dict)
    """Session config entries."""
    cuda: Mapping[str, ScalarOption] = Field(default_factory=dict)
    """CUDA execution provider options."""

    @property
    def attributes(self) -> dict[str, int | bool | str]:
        """Given attributes of `onnxruntime.SessionOptions`, with their values."""
        values = {name: getattr(self, name) for name in _ATTRIBUTES}
        return {name: value for name, value in values.items() if value is not None}


class MeasureSpec(SpecSection):
    """Comparison of default ONNX Runtime and the prepared model."""

    rounds: int = Field(default=5, ge=3, le=99)
    """Fresh processes per plan, page cache warm."""
    cold_rounds: int = Field(default=2, ge=0, le=99)
    """The same with the files dropped from the page cache."""
    steady_s: Seconds = 0.5
    """Seconds of repeated runs per process."""
    timeout_s: Seconds = 600.0
    """Deadline of one process, in seconds."""


class TuneSpec(SpecSection):
    """The search for the best way to store, load and run what was prepared."""

    runs_per_load: int = Field(default=10_000, ge=1, le=10**12)
    """Runs of a session before it is closed: decides between an early first result and short runs."""
    max_trials: int = Field(default=100, ge=0, le=1000)
    """Maximum number of plans to try; 0 takes the base plan without a search."""
    budget_s: Seconds = 300.0
    """Seconds for the search, per target; what has started is finished, and the best plans are always
    compared in three rounds."""
    rounds: int = Field(default=7, ge=3, le=99)
    """Processes per plan in the final comparison, as far as the budget allows; at least three."""
    steady_s: Seconds = 0.3
    """Seconds of repeated runs per process and shape."""
    timeout_s: Seconds = 300.0
    """Deadline of one process, in seconds."""
    max_private_mb: Positive | None = None
    """Maximum private memory of a session's process, in MB of 2**20 bytes."""
    first_phase: bool = True
    """Whether to record a plan that serves until the chosen one is ready, too."""
    fork: bool = False
    """Whether plans for the CPU are compared as forked workers of load_before_fork: on one thread, from the
    fork on."""


Targets = Annotated[tuple[Target, ...], Field(min_length=1), AfterValidator(check_each_once)]


class ModelSpec(SpecSection):
    """One model and everything that is to be done with it."""

    name: Name
    """Name of the bundle: one path component."""
    source: SourceSpec
    inputs: Mapping[str, InputSpec] = Field(default_factory=dict, max_length=1000)
    """What production sends, by input name."""
    samples: Glob | None = None
    """Glob of .npz files with real inputs, relative to the spec."""
    targets: Targets | Literal["auto"] = "auto"
    """Execution providers to prepare for; auto: those this machine has."""
    convert: ConvertSpec | None = None
    """Graph passes before the optimisation; each precision is a variant."""
    optimize: OptimizeSpec = OptimizeSpec()
    runtime: RuntimeSpec = RuntimeSpec()
    verify: VerifySpec = VerifySpec()
    tune: TuneSpec = TuneSpec()
    measure: MeasureSpec = MeasureSpec()

    _folder: Path = PrivateAttr(default=Path())
    _file: str | None = PrivateAttr(default=None)

    @property
    def folder(self) -> Path:
        """Folder of the spec's file, which relative paths start from."""
        return self._folder

    @property
    def place(self) -> str:
        """The file for messages, or the folder if the file is not known."""
        return str(self._folder / (self._file or ""))

    def located_in(self, folder: Path, *, file: str | None = None) -> ModelSpec:
        """Returns the same spec as if its file were `folder/file`."""
        copy = self.model_copy()
        copy._folder, copy._file = folder, file
        return copy


def resolved_spec(spec: ModelSpec) -> dict[str, Any]:
    """Returns everything in a spec that decides what is built, defaults included, as JSON types.

    Equal specs give equal results whatever the order, comments or folder of their files, so a digest can be
    part of a key. Of a local source its file's name is left: its digest is part of every key.
    """
    data = spec.model_dump(mode="json")
    if spec.source.path is not None:
        data["source"]["path"] = Path(spec.source.path).name
    return data


DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles that pydantic derives from fields' names; editors show the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def spec_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of `configs/NAME.yaml`, defaults merged in."""
    body = ModelSpec.model_json_schema(schema_generator=_Untitled)
    return {"$schema": DIALECT, **body, "title": "ortprep model spec"}
