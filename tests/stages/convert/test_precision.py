"""Which samples calibrate a precision, and which judge it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.conversion_record import PrecisionStep
from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.model_facts import ModelInterface
from ortprep.children.answers import Answer, Answers
from ortprep.errors import StageError
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.spec.validation import parse_spec
from ortprep.stages.convert import precision as module
from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.convert.precision import PrecisionAttempts
from ortprep.stages.convert.search import Kept, search
from ortprep.stages.core.contract import Context, Plan, TaskId
from ortprep.stages.core.fallback import TAKEN
from ortprep.stages.core.samples import Sample
from ortprep.stages.verify.reference import ReferenceAnswers

REAL = 6


@pytest.fixture
def judged(monkeypatch):
    """Returns how many samples calibrated and judged each pass that was tried; all of them are refused."""
    found: dict[str, tuple[int, int]] = {}
    requests: list[PassRequest] = []

    def convert(_context: object, request: PassRequest) -> PassReply:
        requests.append(request)
        return cast("PassReply", SimpleNamespace(converted=("node",), kept=(), nodes=1, too_large=()))

    def judge(_spec: object, samples: tuple[Sample, ...], *, expected: Answers, got: object) -> object:
        assert len(expected.samples) == len(samples) == got
        found[requests[-1].name] = len(requests[-1].samples), len(samples)
        return SimpleNamespace(failures=("cosine 0.5",), outputs=())

    def answer(_plan: object, samples: list[Path], _folder: Path, **_options: object) -> int:
        return len(samples)

    monkeypatch.setattr(module, "run_pass", convert)
    monkeypatch.setattr(module, "judge_accuracy", judge)
    monkeypatch.setattr(module, "write_answers", answer)
    return found


def attempts_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variant: str, **convert: Any
) -> PrecisionAttempts:
    """Returns the attempts at a variant of a model with real samples."""
    samples = []
    for number in range(REAL):
        write_tensors(folder / f"{number}.npz", {"x": np.full(4, number, np.float32)})
        samples.append(Sample(str(folder / f"{number}.npz"), "x=[4]", 4, number))
    answers = Answers((), (), tuple((Answer("y", sample.file),) for sample in samples))
    monkeypatch.setattr(
        module, "read_reference", lambda _folder: ReferenceAnswers(tuple(samples), answers, ())
    )
    search = {"max_trials": 0}
    spec = parse_spec({"name": "m", "source": {"path": "m.onnx"}, "convert": {"search": search, **convert}})
    plan = Plan(spec, ("cpu",), {})
    upstream = {TaskId("verify", "cpu"): SimpleNamespace(folder=folder)}
    context = Context(plan, variant, cast("Any", upstream), folder, lambda _line: None)
    x, y = (TensorSpec(name, "float32", (4,)) for name in "xy")
    interface = ModelInterface((x,), (y,), {}, external=False)
    description = SimpleNamespace(interface=interface, source=SimpleNamespace(operators={"Conv": 3}))
    parent = SimpleNamespace(description=description, path=folder / "m.onnx", folder=folder)
    return PrecisionAttempts(context, folder, cast("Any", parent))


def test_only_static_int8_is_judged_by_half_of_the_samples(tmp_path, monkeypatch, judged):
    convert = {"precision": "int8", "ladder": ["int8", "fp16"]}
    attempts = attempts_of(tmp_path, monkeypatch, "cpu-int8", **convert)
    steps = [attempts.try_step("int8"), attempts.try_step("fp16")]
    assert judged == {"int8-static": (3, 3), "fp16": (0, REAL)}
    calibrated_on, judged_on = attempts.sample_sets(steps)
    assert calibrated_on is None
    assert judged_on is not None
    assert judged_on.count == REAL
    taken = PrecisionStep("int8", TAKEN, made_by="int8-static")
    assert [one and one.count for one in attempts.sample_sets([taken])] == [3, 3]


def test_samples_that_calibrate_nothing_may_have_any_numbers(tmp_path, monkeypatch, judged):
    def refuse(*_arguments: object) -> None:
        raise StageError("bad calibration sample")

    monkeypatch.setattr(module, "check_calibration", refuse)
    attempts_of(tmp_path, monkeypatch, "cpu-fp16", precision="fp16").try_step("fp16")
    assert judged == {"fp16": (0, REAL)}


# -- what a search keeps passes the gate, whenever it ends; and few trials find it


Holds = Callable[[Kept], bool]


def name_nodes(count: int) -> tuple[str, ...]:
    return tuple(f"/layer{i}/MatMul" for i in range(count))


def never() -> bool:
    return False


class Gate:
    """Asked about a set of nodes; what it was asked is remembered, and nothing may be asked twice."""

    def __init__(self, holds: Holds) -> None:
        self.holds = holds
        self.asked: list[Kept] = []

    def __call__(self, kept: Kept) -> bool:
        assert kept not in self.asked
        self.asked.append(kept)
        return self.holds(kept)


def find(
    nodes: Sequence[str], holds: Holds, *, max_trials: int = 10_000, is_ranked: bool = False
) -> tuple[Kept, int]:
    return search(nodes, holds, max_trials=max_trials, expired=never, is_ranked=is_ranked)


def needs(culprits: Collection[str]) -> Holds:
    return frozenset(culprits).issubset


NODES = st.integers(0, 40).map(name_nodes)


@st.composite
def monotone(draw: st.DrawFn) -> tuple[tuple[str, ...], Holds]:
    """A gate that holds if any of some sets is kept, or if what is given up does not weigh too much."""
    nodes = draw(NODES)
    sets = st.frozensets(st.sampled_from(nodes)) if nodes else st.just(frozenset[str]())
    either = draw(st.lists(sets, min_size=1, max_size=3))
    weights = {node: draw(st.integers(0, 9)) for node in nodes}
    allowed = draw(st.integers(0, 60))

    def holds(kept: Kept) -> bool:
        lost = sum(weight for node, weight in weights.items() if node not in kept)
        return bool(kept) and any(some <= kept for some in either) and lost <= allowed

    return nodes, holds


@given(monotone(), st.booleans())
def test_nothing_more_can_be_given_up_of_what_is_kept(case, is_ranked):
    nodes, holds = case
    kept, _ = find(nodes, Gate(holds), is_ranked=is_ranked)
    assert kept == frozenset(nodes) or holds(kept)
    assert not any(holds(kept - {node}) for node in kept)


@given(NODES, st.data(), st.integers(0, 30), st.booleans())
def test_what_is_kept_holds_however_strange_the_gate_and_small_the_budget(nodes, data, max_trials, is_ranked):
    seed = data.draw(st.integers(0, 1000))
    gate = Gate(lambda kept: hash((seed, len(kept), sum(map(nodes.index, kept)))) % 3 > 0)
    kept, trials = find(nodes, gate, max_trials=max_trials, is_ranked=is_ranked)
    assert trials == len(gate.asked) <= max_trials
    assert frozenset() not in gate.asked
    assert kept == frozenset(nodes) or (kept in gate.asked and gate.holds(kept))


def test_of_two_halves_one_is_not_tried_if_the_other_could_be_given_up():
    nodes = name_nodes(512)
    assert find(nodes, Gate(needs(nodes[-1:]))) == (frozenset(nodes[-1:]), 9)
    assert find(nodes, Gate(needs(nodes[255::256]))) == (frozenset(nodes[255::256]), 2 + 2 * 8)


def test_the_worst_of_ranked_nodes_take_few_trials():
    nodes = name_nodes(512)
    assert find(nodes, needs(nodes[-1:]), is_ranked=True) == (frozenset(nodes[-1:]), 1)
    for many in (2, 3, 4, 8):
        culprits = frozenset(nodes[-many:])
        kept, trials = find(nodes, Gate(needs(culprits)), is_ranked=True)
        assert kept == culprits
        assert trials <= 2 * many + 3 < find(nodes, needs(culprits))[1]


@given(st.integers(6, 600), st.sets(st.integers(0, 599), min_size=1, max_size=6), st.booleans())
def test_scattered_culprits_take_a_logarithm_of_trials_each(count, places, is_ranked):
    nodes = name_nodes(count)
    culprits = frozenset(nodes[place % count] for place in places)
    (kept, trials), many = find(nodes, Gate(needs(culprits)), is_ranked=is_ranked), len(culprits)
    assert kept == culprits
    extra = is_ranked * (1 + math.log(count, 4))  # for a ranking that says nothing
    assert trials <= 2 * many * math.log2(count / many) + 4 * many + extra


def test_a_search_ends_when_its_time_is_up():
    nodes, asked = name_nodes(100), Gate(needs(name_nodes(3)))
    assert search(nodes, asked, max_trials=1000, expired=lambda: len(asked.asked) >= 5)[1] == 5
    assert search(nodes, asked, max_trials=1000, expired=lambda: True) == (frozenset(nodes), 0)
