"""Whatever a model declares, and whatever ONNX Runtime says, there is something to feed."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.model_facts import ModelFacts, ModelInterface
from ortprep.init.graph_facts import GraphFacts
from ortprep.init.input_search import MAX_ATTEMPTS, Feed, InputSearch, RunResult
from tests.init.test_error_hints import BROADCAST, CONCAT, GATHER, GEMM, RESHAPE

NAMES = [
    "x",
    "image",
    "past.0.key",
    "mask",
    "pad_mask",
    "lens",
    "sr",
    "orig_size",
    "input_ids",
    "position_ids",
]
DTYPES = [
    "float32",
    "float16",
    "int64",
    "int16",
    "uint8",
    "uint4",
    "bool",
    "string",
    "complex64",
    "float8e4m3fn",
]
AXES = [
    "batch",
    "past",
    "2*past",
    "past + seq",
    "seq",
    "total_len",
    "total_len + 1",
    "h",
    "w",
    "1" * 5000,
    "a b",
    "3*",
]
SAID = ["", "no", CONCAT, GEMM, GATHER, BROADCAST.format("17 by 128"), RESHAPE % 1024]

axes = st.sampled_from([None, 0, 1, 3, 80, 640, *AXES])
shape = st.none() | st.lists(axes, max_size=5).map(tuple)
inputs = st.lists(
    st.builds(TensorSpec, st.sampled_from(NAMES), st.sampled_from(DTYPES), shape),
    max_size=3,
    unique_by=lambda one: one.name,
)


@given(inputs, st.lists(st.sampled_from(SAID), min_size=1), st.sampled_from([{}, {"input_ids": 9, "x": 1}]))
@example([TensorSpec("x", "int64", ("2*past", "total_len", "past", "seq"))], [""], {})
@settings(max_examples=60, deadline=None)
def test_the_search_ends_and_keeps_what_the_model_declares(items, said, bounds):
    runs: list[Mapping[str, Feed]] = []

    def run(feeds: Mapping[str, Feed]) -> RunResult:
        runs.append(feeds)
        return RunResult(said[len(runs) % len(said)], doubt="" if len(runs) % 2 else "doubtful")

    interface = ModelInterface(tuple(items), (), bounds, external=False)
    facts = GraphFacts(ModelFacts(interface, {}, 8, {}, 0, {}), {"image": 255.0}, ("join", "head"))
    best = InputSearch(facts, {}, run).find()
    assert best.feeds in runs
    assert len(runs) <= MAX_ATTEMPTS
    assert all(one not in runs[:number] for number, one in enumerate(runs))
    for feeds in runs:
        for item in items:
            fed = feeds[item.name]
            declared = (None, None) if item.shape is None else item.shape
            assert len(fed.shape) == len(declared)
            for size, axis in zip(fed.shape, declared, strict=True):
                assert size == axis or not isinstance(axis, int)
            assert fed.values.range is None or fed.values.values is None
