"""A spec as commented YAML: every value with the reason why it was chosen. Pure."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Set
from typing import Any

from ortprep.bundle.loader_config import TensorSpec
from ortprep.init.input_search import Feed
from ortprep.init.trial_run import InitTrial
from ortprep.spec.reading import OPEN_QUESTION

_WIDTH = 110
_PLAIN = re.compile(r"(\.\./)*[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = frozenset(("null", "true", "false"))
_TRIALS = 40
_MIN_BUDGET_S, _MAX_BUDGET_S = 60, 900
_PROCESS_S = 1.0
_PRECISION = (
    "Precision: that of the model. Lower precision changes answers, so you must ask for it: "
    "`convert: {precision: int8, ladder: [int8, fp32]}` tries int8 behind an accuracy gate."
)


def write_spec_text(
    trial: InitTrial,
    *,
    name: str,
    path: str,
    size_bytes: int,
    defaults: Set[str],
    sections: Mapping[str, Any],
    question: str,
) -> str:
    """Returns a spec as YAML.

    Args:
        trial: Result of running the model.
        name: Name of the spec.
        path: The model, relative to the spec's folder.
        size_bytes: Size of the model, weights included.
        defaults: Keys that the folder's `defaults.yaml` already gives.
        sections: Further sections of the spec, which replace the proposed ones.
        question: The question that is left; "" for none.
    """
    ran = "did not run" if trial.error else "ran"
    how = f"The model {ran} on these inputs with ONNX Runtime {trial.onnxruntime}."
    lines = comment(
        f"Written by `ortprep init`. {how} Every value is a proposal: replace it with what production sends."
    )
    if question:
        lines.append(f"{OPEN_QUESTION} {question}")
    lines += comment(trial.doubt)
    if trial.changes:
        lines += comment(f"The source is a copy of the model: {'; '.join(trial.changes)}.")
    opset = trial.facts.opsets.get("", 0)
    lines += [
        f"name: {_scalar(name)}",
        f"source: {{path: {_scalar(path)}}}  # {size_bytes / 1e6:.1f} MB, opset {opset}",
    ]
    if trial.feeds:
        lines += ["", "inputs:"]
    for item in trial.facts.interface.inputs:
        lines += _describe_input(item, trial.feeds[item.name])
    proposed = {
        "targets": ["", "targets: auto  # cpu, and cuda on machines where it works"],
        "convert": comment(_PRECISION),
        "tune": [_budget(trial)],
    }
    for key, section in proposed.items():
        if key not in sections and key not in defaults:
            lines += section
    lines += [f"{_scalar(key)}: {_flow(value)}" for key, value in sections.items()]
    return "\n".join([*lines, ""])


def show_shape(item: TensorSpec) -> str:
    """Returns a declared shape as people write it: `[batch, 3, ?, ?]`, `of any rank` for none."""
    if item.shape is None:
        return "of any rank"
    return f"[{', '.join('?' if axis is None else show(str(axis)) for axis in item.shape)}]"


def show(text: str) -> str:
    """Returns text for a comment: on one line, without what an editor or a terminal takes for orders."""
    return "".join(one if one.isprintable() else " " for one in text)


def comment(text: str, *, indent: int = 0) -> list[str]:
    """Returns text as lines of a YAML comment."""
    wrapped = textwrap.wrap(show(text), _WIDTH - indent - 2)
    return [f"{' ' * indent}# {line}" for line in wrapped]


def _describe_input(item: TensorSpec, feed: Feed) -> Iterator[str]:
    """Yields the lines of one input: its type, shapes and values, with the reasons."""
    yield f"  {_scalar(item.name)}:  # {show(item.dtype)} {show_shape(item)}"
    yield from comment(feed.reason, indent=4)
    yield f"    shapes: [{', '.join(str(list(shape)) for shape in feed.shapes)}]"
    values = feed.values
    if values.range is not None:
        low, high = (_number(one) for one in values.range)
        yield f"    range: [{low}, {high}]  # {show(values.reason)}"
    elif values.values is not None:
        yield f"    values: {_flow(list(values.values))}  # {show(values.reason)}"


def _budget(trial: InitTrial) -> str:
    """Returns the budget of a search that is worth it: time for 40 plans, at most 15 minutes."""
    trial_s = _PROCESS_S + trial.load_s + 10 * trial.run_s
    budget = min(max(math.ceil(_TRIALS * trial_s / 30) * 30, _MIN_BUDGET_S), _MAX_BUDGET_S)
    count = max(1, int(budget / trial_s))
    return f"tune: {{runs_per_load: 1000, budget_s: {budget}}}  # about {count} plans at {trial_s:.1f} s each"


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else _flow(text)


def _flow(value: object) -> str:
    """Returns a value as JSON, which is YAML too, up to characters that YAML wants escaped another way."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(value)
