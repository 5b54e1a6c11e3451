"""Which samples calibrate a precision, and which judge it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.build.build_plan import STAGES
from ortprep.build.execution import build_tasks
from ortprep.children.answers import Answer, Answers
from ortprep.spec.validation import parse_spec
from ortprep.stages.convert.precision import plan_steps
from ortprep.stages.convert.search import search
from ortprep.stages.convert.stage import ConvertStage
from ortprep.stages.core.contract import Plan, TaskId
from ortprep.stages.core.results import FETCH, source_task
from ortprep.stages.core.samples import Sample
from ortprep.stages.verify.reference import ReferenceAnswers, held_out


def reference_of(*real):
    """Returns a reference of samples, given each one's number among the spec's own."""
    samples = tuple(Sample(f"{number}.npz", "x=[4]", 4, own) for number, own in enumerate(real))
    return ReferenceAnswers(samples, Answers((), (), tuple((Answer("y", one.file),) for one in samples)), ())


@pytest.mark.parametrize(
    ("real", "judging"),
    [
        ((None, 0, 1, 2, 3), ["0.npz", "2.npz", "4.npz"]),  # what is drawn calibrates nothing
        ((1, 0), ["0.npz"]),
        ((0, None), ["0.npz", "1.npz"]),  # one real sample has no halves
        ((None, None), ["0.npz", "1.npz"]),
    ],
)
def test_half_of_the_real_samples_is_held_out_where_there_are_halves(real, judging):
    held = held_out(reference_of(*real))
    assert [sample.file for sample in held.samples] == judging
    assert [answer.file for (answer,) in held.answers.samples] == judging


# -- what a search keeps passes the gate, whenever it ends; and few trials find it


def name_nodes(count):
    return tuple(f"/layer{i}/MatMul" for i in range(count))


def never():
    return False


class Gate:
    """Asked about a set of nodes; what it was asked is remembered, and nothing may be asked twice."""

    def __init__(self, holds):
        self.holds = holds
        self.asked = []

    def __call__(self, kept):
        assert kept not in self.asked
        self.asked.append(kept)
        return self.holds(kept)


def find(nodes, holds, *, max_trials=10_000, is_ranked=False):
    return search(nodes, holds, max_trials=max_trials, expired=never, is_ranked=is_ranked)


def needs(culprits):
    return frozenset(culprits).issubset


NODES = st.integers(0, 40).map(name_nodes)


@st.composite
def monotone(draw):
    """A gate that holds if any of some sets is kept, or if what is given up does not weigh too much."""
    nodes = draw(NODES)
    sets = st.frozensets(st.sampled_from(nodes)) if nodes else st.just(frozenset[str]())
    either = draw(st.lists(sets, min_size=1, max_size=3))
    weights = {node: draw(st.integers(0, 9)) for node in nodes}
    allowed = draw(st.integers(0, 60))

    def holds(kept):
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


@given(st.integers(6, 600), st.sets(st.integers(0, 599), min_size=1, max_size=6), st.booleans())
def test_scattered_culprits_take_a_logarithm_of_trials_each(count, places, is_ranked):
    nodes = name_nodes(count)
    culprits = frozenset(nodes[place % count] for place in places)
    (kept, trials), many = find(nodes, Gate(needs(culprits)), is_ranked=is_ranked), len(culprits)
    assert kept == culprits
    extra = is_ranked * (1 + math.log(count, 4))  # for a ranking that says nothing
    assert trials <= 2 * many * math.log2(count / many) + 4 * many + extra


# -- which variants a spec asks for, and which task makes the graph of each


def plan(*targets, **convert):
    spec = {"name": "net", "source": {"path": "net.onnx"}, **({"convert": convert} if convert else {})}
    return Plan(parse_spec(spec), targets or ("cpu",))


def test_a_graph_comes_from_the_nearest_ancestor_that_changes_it():
    made = plan(precision="int8")
    assert source_task(made, "cpu") == source_task(made, "portable") == FETCH
    assert source_task(made, "cpu-int8") == TaskId("convert", "cpu-int8")
    fused = plan(precision="int8", fusion={"model_type": "bert"})
    assert source_task(fused, "cpu") == TaskId("convert", "cpu")
    assert source_task(fused, "portable") == FETCH
    # A judge's bundle names the source's files, whatever the precision is converted from.
    assert {FETCH, TaskId("convert", "cpu")} <= set(ConvertStage().requires(fused, "cpu-int8"))


@pytest.mark.parametrize(
    "convert",
    [{}, {"precision": ["fp16", "int8"]}, {"fusion": {"model_type": "gpt2"}, "precision": {"cuda": "fp16"}}],
)
@pytest.mark.parametrize("targets", [("cpu",), ("cuda",), ("cuda", "cpu")])
def test_tasks_come_after_those_they_require_the_source_first_and_the_bundle_last(convert, targets, tmp_path):
    tasks = build_tasks(plan(*targets, **convert), STAGES, tmp_path)
    seen = set()
    for task in tasks:
        assert set(task.requires) <= seen, task.id
        seen.add(task.id)
    assert tasks[0].id == FETCH
    assert tasks[-1].id == TaskId("package")


def test_the_ladder_goes_down_from_what_is_asked_for():
    ladder = ("int8", "bf16", "fp16", "fp32")
    assert plan_steps("int8", ladder) == ladder
    assert plan_steps("fp16", ladder) == ("fp16", "fp32")
    assert plan_steps("int4", ladder) == ("int4", *ladder)
    assert plan_steps("int8", ()) == ("int8",)
