"""The spec's section `convert`: conversions that a user asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from ortprep.spec.fields import (
    Argument,
    Identifier,
    NotNegative,
    Number,
    Seconds,
    SpecSection,
    Target,
    Text,
    check_each_once,
)

Precision = Literal["fp16", "bf16", "int8", "int4"]
"""What a variant can be converted to, but for as few fp32 nodes as its accuracy needs."""

Step = Literal["fp32", Precision]
"""A precision to fall back to; `fp32` leaves the variant out."""

Metric = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Precisions = Annotated[tuple[Precision, ...], AfterValidator(check_each_once)]

AUTO = "auto"
_CANDIDATES: Mapping[str, tuple[Precision, ...]] = {"cpu": ("int8",), "cuda": ("fp16",)}
"""What `precision: auto` tries, by target: what its execution provider can run faster than fp32."""


class FusionSpec(SpecSection):
    """Fusion of transformer subgraphs by `onnxruntime.transformers.optimizer`."""

    model_type: Text
    """Kind of model that the optimizer knows: bert, gpt2, vit, unet, …."""
    num_heads: int = Field(default=0, ge=0, le=65_536)
    """Attention heads; required if attention is to be fused."""
    hidden_size: int = Field(default=0, ge=0, le=2**24)
    """Features per token, of all heads together; as num_heads."""
    library: Literal["onnxruntime", "onnxruntime-tools"] = "onnxruntime"
    """Package whose optimizer fuses; the second is the older one."""
    disable: tuple[Text, ...] = ()
    """Fusions to skip: attention, gelu, …."""


class QuantizeSpec(SpecSection):
    """Quantisation, for `int8` and `int4`."""

    mode: Literal["auto", "dynamic", "static", "weight_only"] = "auto"
    """For int8: activations are quantised at run time, with calibrated ranges, or not at all; auto chooses by
    target and model. int4 is always weight_only."""
    per_channel: bool = True
    """Whether every output channel has a scale."""
    operators: tuple[Identifier, ...] = ()
    """Operators to quantise; by default those with kernels."""
    block_size: Literal[16, 32, 64, 128, 256] = 32
    """For weight_only: number of weights that share a scale."""
    symmetric: bool = True
    """For weight_only: whether zero is exact."""


class ThresholdsSpec(SpecSection):
    """Distance of an output from the unconverted source's; null sets no threshold."""

    max_abs: NotNegative | None = None
    """Largest absolute difference."""
    snr_db: Number | None = 20.0
    """Minimum signal-to-noise ratio in decibels, for every sample."""
    top1: Annotated[float, Field(ge=0, le=1)] | None = None
    """Minimum share of rows with the same largest element as the reference."""


class GateSpec(ThresholdsSpec):
    """Accuracy that a converted model must reach to be shipped."""

    outputs: Mapping[str, ThresholdsSpec] = Field(default_factory=dict)
    """Thresholds by output name; the common ones apply where it sets none."""
    metric: Metric | None = None
    """Your own module:function, relative to the spec: (inputs, expected, got) → number."""
    metric_at_least: Number | None = None
    """Minimum that the metric must return."""

    def thresholds(self, *, of_all: bool = True, defaults: bool = True) -> dict[str, dict[str, float]]:
        """Returns the thresholds that are set, by output and figure; "" for outputs without any of their own.

        Without `of_all` they are for a part of the samples, of which a share of all of them says nothing.
        Without `defaults` they are those that the spec sets itself.
        """
        figures = [one for one in ThresholdsSpec.model_fields if of_all or one != "top1"]
        common = self.model_dump(include={*figures}, exclude_unset=not defaults)
        own = {
            name: common | section.model_dump(include={*figures}, exclude_unset=True)
            for name, section in self.outputs.items()
        }
        return {
            name: {figure: bounds[figure] for figure in figures if bounds.get(figure) is not None}
            for name, bounds in {"": common, **own}.items()
        }

    @model_validator(mode="after")
    def _metric_has_threshold(self) -> GateSpec:
        if (self.metric is None) != (self.metric_at_least is None):
            raise ValueError("expected metric and metric_at_least together")
        return self


class SearchSpec(SpecSection):
    """The search for nodes to leave unconverted when the gate does not hold."""

    max_trials: int = Field(default=200, ge=0, le=100_000)
    """Maximum number of sets of nodes to try."""
    budget_s: Seconds = 1800.0
    """Seconds for the search; a trial that has started is finished."""


def _check_program(run: tuple[str, ...]) -> tuple[str, ...]:
    if not run[0]:
        raise ValueError("expected a program first, got an empty text")
    return run


class JudgeSpec(SpecSection):
    """The application as the judge: it must answer with a converted model as it does without."""

    run: Annotated[tuple[Argument, ...], Field(min_length=1), AfterValidator(_check_program)]
    """Program and arguments. It runs on its own, and then with the candidate."""
    folder: Text = "."
    """Folder to run it in, relative to the spec."""
    compare: Text = "stdout"
    """What must stay the same, line by line: stdout, or a file that the program writes, relative to its
    folder; or your own file.py:function, relative to the spec: (stdout, stdout with the candidate) →
    agreement from 0 to 1."""
    min_agreement: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Minimum agreement: the share of lines that are equal."""
    timeout_s: Seconds = 600.0
    """Deadline of one run, in seconds."""

    @property
    def function(self) -> tuple[str, str] | None:
        """The user's function: its folder, relative to the spec, and `module:function`; None for lines."""
        file, separator, name = self.compare.rpartition(":")
        folder, _, module = file.rpartition("/")
        is_function = separator and module.endswith(".py")
        return (folder or ".", f"{module.removesuffix('.py')}:{name}") if is_function else None


class ConvertSpec(SpecSection):
    """Graph passes before the one-time optimisation, each gated by measured accuracy."""

    fusion: FusionSpec | None = None
    """Fuse transformer subgraphs."""
    precision: Literal["auto"] | Precision | Precisions | Mapping[Target, Precision | Precisions] = ()
    """Precisions to prepare as variants beside fp32, for all targets or by target; auto: static int8 on CPUs
    with instructions for it, fp16 on GPUs, and only what is 1.1 times as fast as fp32."""
    keep_nodes: tuple[Text, ...] = ()
    """Nodes that no precision converts, by name."""
    quantize: QuantizeSpec = QuantizeSpec()
    gate: GateSpec = GateSpec()
    judge: JudgeSpec | None = None
    """An application that judges what is converted, in place of the gate's defaults."""
    ladder: Annotated[tuple[Step, ...], AfterValidator(check_each_once)] = ()
    """Precisions to try, from left to right, if one does not pass its gate: [int8, fp16, fp32]; the build
    fails if none is left."""
    search: SearchSpec = SearchSpec()
    timeout_s: Seconds = 3600.0
    """Deadline of one pass, in seconds."""

    @field_validator("ladder")
    @classmethod
    def _ends_in_fp32(cls, value: Any) -> Any:
        if "fp32" in value[:-1]:
            raise ValueError("expected nothing after fp32, which is always accurate enough")
        return value

    @property
    def is_auto(self) -> bool:
        """Whether only what is faster than fp32 is made."""
        return self.precision == AUTO

    @property
    def steps_below(self) -> tuple[Step, ...]:
        """Precisions to try after the requested one."""
        return self.ladder or (("fp32",) if self.is_auto else ())

    def thresholds(self, *, of_all: bool = True) -> dict[str, dict[str, float]]:
        """Returns the gate's thresholds; an application that judges replaces those that are not set."""
        return self.gate.thresholds(of_all=of_all, defaults=self.judge is None)

    def precisions(self, target: str) -> tuple[str, ...]:
        """Returns what is made for a target besides fp32, in the order of the spec."""
        if self.is_auto:
            return _CANDIDATES[target]
        chosen: Any = self.precision
        if isinstance(chosen, Mapping):
            chosen = chosen.get(target, ())
        return (chosen,) if isinstance(chosen, str) else chosen
