"""A spec as commented YAML: every value with the reason why it was chosen. Pure."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ortprep.bundle.loader_config import TensorSpec
from ortprep.init.graph_facts import GraphFacts
from ortprep.init.input_search import Feed, ObservedInput
from ortprep.init.shapes import ShapePlan
from ortprep.init.trial_run import InitTrial
from ortprep.spec.models import VerifySpec
from ortprep.spec.reading import OPEN_QUESTION

_WIDTH = 110
_PLAIN = re.compile(r"(\.\./)*[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = frozenset(("null", "true", "false"))
_MB = 1e6
_TRIALS = 40
_MIN_BUDGET_S, _MAX_BUDGET_S = 60, 900
_PROCESS_S = 1.0
_TOLERANCE_ROOM = 3.0


@dataclass(frozen=True)
class Question:
    """What `init` could not find out.

    Attributes:
        input: Which input the answer is about.
        declared: Its shape, as the model declares it.
        tried: Shapes of it that were tried, each once.
        said: What ONNX Runtime said to the last of them.
    """

    input: str
    declared: str
    tried: tuple[tuple[int, ...], ...]
    said: str

    @property
    def text(self) -> str:
        """The question in one line."""
        tried = ", ".join(str(list(shape)) for shape in self.tried[:6])
        more = f" and {len(self.tried) - 6} more" if len(self.tried) > 6 else ""
        return (
            f"which shape does input {_shown(self.input)} {self.declared} take? "
            f"Tried {tried}{more}; ONNX Runtime said: {_shown(self.said)}"
        )


@dataclass(frozen=True)
class Draft:
    """All that a spec is written from.

    Attributes:
        name: Of the spec.
        path: Of the model, relative to the spec's folder.
        size_bytes: Of the model, weights included.
        observed: What was known of inputs before.
        defaults: Keys that the folder's `defaults.yaml` already gives.
        sections: Further sections of the spec, which win over the proposed ones.
        question: What is left to ask, None for nothing.
        changes: What the copy of the model that the spec is for has otherwise, a line each.
    """

    name: str
    path: str
    size_bytes: int
    facts: GraphFacts
    plan: ShapePlan
    trial: InitTrial
    observed: Mapping[str, ObservedInput] = field(default_factory=dict)
    defaults: frozenset[str] = frozenset()
    sections: Mapping[str, Any] = field(default_factory=dict)
    question: Question | None = None
    changes: tuple[str, ...] = ()


def write_spec_text(draft: Draft) -> str:
    """Returns the spec as YAML."""
    return "\n".join([*_head(draft), *_inputs(draft), *_settings(draft), ""])


def show_shape(item: TensorSpec) -> str:
    """Returns a declared shape as people write it: `[batch, 3, ?, ?]`, `of any rank` for none."""
    if item.shape is None:
        return "of any rank"
    return f"[{', '.join('?' if axis is None else _shown(str(axis)) for axis in item.shape)}]"


def _head(draft: Draft) -> Iterator[str]:
    trial = draft.trial
    opset = draft.facts.inspection.opsets.get("", 0)
    if trial.ran:
        how = f"The model ran on these inputs with ONNX Runtime {trial.onnxruntime}."
    else:
        how = f"The model did not run on these inputs with ONNX Runtime {trial.onnxruntime}."
    yield from _comment(
        f"Written by `ortprep init`. {how} Every value is a proposal: replace it with what production sends."
    )
    if draft.question is not None:
        yield f"{OPEN_QUESTION} {draft.question.text}"
    if trial.ran and not trial.is_finite:
        yield from _comment("Some answers are not finite numbers: other ranges may suit the model better.")
    if trial.ran and not trial.is_repeatable:
        yield from _comment("The model draws random numbers: two runs differ, so answers cannot be verified.")
    if draft.changes:
        yield from _comment(f"The source is a copy of the model: {'; '.join(draft.changes)}.")
    yield f"name: {_scalar(draft.name)}"
    yield f"source: {{path: {_scalar(draft.path)}}}  # {draft.size_bytes / _MB:.1f} MB, opset {opset}"


def _inputs(draft: Draft) -> Iterator[str]:
    inputs = draft.facts.inspection.interface.inputs
    if inputs:
        yield ""
        yield "inputs:"
    for item in inputs:
        feed = draft.trial.feeds[item.name]
        yield f"  {_scalar(item.name)}:  # {_shown(item.dtype)} {show_shape(item)}"
        yield from _comment(_shape_reasons(item, draft), indent=4)
        seen = draft.observed.get(item.name)
        shapes = seen.shapes if seen is not None and seen.shapes else (feed.shape,)
        yield f"    shapes: [{', '.join(str(list(shape)) for shape in shapes)}]"
        yield from _values(feed)


def _shape_reasons(item: TensorSpec, draft: Draft) -> str:
    seen = draft.observed.get(item.name)
    if seen is not None and seen.shapes:
        return seen.reason
    reasons = []
    for axis, key in enumerate(draft.plan.axes[item.name]):
        one = draft.plan.find(str(key)) if isinstance(key, str) else None
        if one is not None:
            size = draft.trial.feeds[item.name].shape[axis]
            refused = [] if size == one.sizes[0] else [f"{one.sizes[0]} did not run"]
            reasons.append(f"{size}: {', '.join([one.reason, *refused])}")
    return "; ".join(dict.fromkeys(reasons))


def _values(feed: Feed) -> Iterator[str]:
    drawn = feed.drawn
    if drawn.range is not None:
        low, high = (_number(one) for one in drawn.range)
        yield f"    range: [{low}, {high}]  # {_shown(drawn.reason)}"
    elif drawn.values is not None:
        yield f"    values: {_flow(list(drawn.values))}  # {_shown(drawn.reason)}"


def _settings(draft: Draft) -> Iterator[str]:
    proposed = {
        "targets": _targets(),
        "convert": _precision(draft.facts),
        "tune": _budget(draft),
        "verify": _tolerances(draft.trial),
    }
    for key, lines in proposed.items():
        if key not in draft.sections and (key not in draft.defaults or key == "verify"):
            yield from lines
    for key, value in draft.sections.items():
        yield f"{_scalar(key)}: {_flow(value)}"


def _targets() -> Iterator[str]:
    yield ""
    yield "targets: auto  # cpu, and cuda on machines where it works"


def _precision(facts: GraphFacts) -> Iterator[str]:
    if facts.quantized:
        why = "The weights are quantised already, so nothing is converted."
    elif facts.half:
        why = "The weights are 16-bit already, so nothing is converted."
    else:
        why = (
            "Precision: that of the model. Lower precision changes answers, so you must ask for it: "
            "`convert: {precision: int8, ladder: [int8, fp32]}` tries int8 behind an accuracy gate."
        )
    yield from _comment(why)


def _budget(draft: Draft) -> Iterator[str]:
    trial = draft.trial
    trial_s = _PROCESS_S + trial.load_s + 10 * trial.run_s
    budget = min(max(math.ceil(_TRIALS * trial_s / 30) * 30, _MIN_BUDGET_S), _MAX_BUDGET_S)
    count = max(1, int(budget / trial_s))
    yield f"tune: {{runs_per_load: 1000, budget_s: {budget}}}  # about {count} plans at {trial_s:.1f} s each"


def _tolerances(trial: InitTrial) -> Iterator[str]:
    noisy = [one for one in trial.noise if one.is_small]
    if not noisy:
        return
    yield from _comment(
        "ONNX Runtime's own optimisation changes these outputs by "
        + ", ".join(f"{one.max_abs:.2g}" for one in noisy)
        + ", close to or beyond the usual tolerance, so they get three times that."
    )
    outputs = {
        one.output: {"rtol": VerifySpec().rtol, "atol": _round_up(_TOLERANCE_ROOM * one.max_abs)}
        for one in noisy
    }
    yield f"verify: {_flow({'outputs': outputs})}"


def _round_up(value: float) -> float:
    if value <= 0:
        return VerifySpec().atol
    step = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(value / step) * step:.6g}")


def _comment(text: str, *, indent: int = 0) -> Iterator[str]:
    for line in textwrap.wrap(_shown(text), _WIDTH - indent - 2):
        yield f"{' ' * indent}# {line}"


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else _flow(text)


def _flow(value: object) -> str:
    """Returns a value as JSON, which is YAML too, up to characters that YAML wants escaped another way."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(value)


def _shown(text: str) -> str:
    """Returns text for a comment: on one line, without what an editor or a terminal takes for orders."""
    return "".join(one if one.isprintable() else " " for one in text)
