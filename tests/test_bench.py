"""The benchmarks: their arithmetic, what the fuzzer found, and that every folder of tests is collected."""

import os
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from onnx.backend.test.case.test_case import TestCase as SuiteCase

from bench.backend_case import CRASHED, DIFFERENT, EQUAL, NOT_RUN, Verdict, check_case
from bench.backend_suite import LISTED, find_surprises, run_suite
from bench.fuzz import CORPUS, TARGETS
from bench.load_cost import (
    FALLBACK,
    LOAD,
    PLAIN,
    compare,
    judge,
)
from bench.models import DEFAULTS, write_specs
from bench.small_models import SMALL_MODELS, small_specs
from bench.start import (
    ScriptTimes,
    load,
    optimize_by_hand,
    plain,
    run_script,
    same_file,
    write_script,
)
from ortprep.bundle import onnx_wire
from ortprep.bundle.file_memory import CACHE_VARIABLE
from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.spec.reading import read_specs
from tests.builders import zero_inputs
from tests.runtime.builders import sample, write_bundle


def runs(*, first_ms=900.0, answer="total"):
    """Three processes on a machine that changes its speed."""
    return [
        {"first_ms": first_ms * speed, "whole_ms": 1200 * speed, "call_ms": 80 * speed, "answer": answer}
        for speed in (1.0, 1.4, 0.9)
    ]


# -- what `bench.init` says of a folder of models


# -- test_load_cost


def run(script, folder):
    write_tensors(folder / "sample.npz", {"x": sample()})
    write_script(script, folder / "sample.npz", folder / "script.py", steady_s=0.01)
    return run_script(folder / "script.py", timeout_s=600)


@pytest.mark.parametrize("name", ["plain", "by hand", "same file", "load", "imported"])
def test_every_way_answers_and_its_parts_fit_into_the_time_seen_from_outside(name, tmp_path):
    bundle = write_bundle(tmp_path / "net", first=SessionOptionsRecord("ORT_DISABLE_ALL"))
    scripts = {
        "plain": plain(bundle / read_loader_config(bundle).variants[0].model),
        "by hand": optimize_by_hand(bundle / read_loader_config(bundle).variants[0].model),
        "same file": same_file(bundle),
        "load": load(bundle, more=", target='cpu'"),
        "imported": load(bundle, imported=True),
    }
    start = run(scripts[name], tmp_path)
    assert start.ready_ms > start.call_ms == start.import_ms + start.init_ms + start.first_ms
    assert start.steady_ms is not None
    assert start.private_mb > 1


def test_the_same_file_makes_the_session_that_load_makes(tmp_path):
    options = SessionOptionsRecord(
        "ORT_ENABLE_BASIC", {"intra_op_num_threads": 1}, {"session.disable_prepacking": "1"}
    )
    bundle = write_bundle(tmp_path / "net", options=options)
    names = {}
    exec(f"{same_file(bundle).imports}\n{same_file(bundle).session}", names)
    made = names["options"]
    assert made.intra_op_num_threads == 1
    assert made.get_session_config_entry("session.disable_prepacking") == "1"
    assert made.graph_optimization_level.name == "ORT_ENABLE_BASIC"


def starts(ready_ms, *, init_ms=20.0, steady_ms=5.0):
    """Three processes on a machine that changes its speed."""
    return [
        ScriptTimes(ready_ms * speed, 0.0, init_ms * speed, 10.0 * speed, 9.0, steady_ms * speed, 50.0)
        for speed in (1.0, 1.5, 0.8)
    ]


def test_pairs_of_a_round_are_compared_so_that_the_machines_speed_cancels():
    results = {PLAIN: starts(100.0), LOAD: starts(50.0, steady_ms=4.0), FALLBACK: starts(200.0)}
    figures = compare(results)
    assert figures["load_sooner"] == pytest.approx(2.0)
    assert figures["load_steady"] == pytest.approx(0.8)
    assert figures["fallback_sooner"] == pytest.approx(0.5)


def test_one_slow_model_misses_its_goal_though_the_mean_reaches_it():
    verdicts = judge("small", {"a": {"load_sooner": 2.0}, "b": {"load_sooner": 0.9}})
    assert [(verdict.reached, pytest.approx(verdict.got)) for verdict in verdicts] == [
        (True, 1.8**0.5),
        (False, 0.9),
    ]


def test_specs_of_the_small_models_are_specs(tmp_path):
    write_specs(small_specs(SMALL_MODELS, tmp_path), tmp_path / "configs", defaults=DEFAULTS)
    assert {spec.name for spec in read_specs(tmp_path / "configs")} == set(SMALL_MODELS)


# -- the comparison of precisions keeps to its own folder


# -- the tests themselves: every folder is collected, and every file of the corpus is read or refused

# -- a plain run runs everything

TESTS = Path(__file__).parent


def test_no_folder_of_tests_has_a_name_that_pytest_passes_over(pytestconfig):
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    passed_over = [folder for folder in folders for part in folder.parts if _matches(part, patterns)]
    assert passed_over == []


def _matches(name, patterns):
    return any(fnmatch(name, pattern) for pattern in patterns)


# -- what fuzzing began with and found stays within the law of `bench.fuzz`

FILES = sorted(file for file in CORPUS.glob("*/*"))


@pytest.mark.attack
@pytest.mark.parametrize("target", TARGETS)
def test_every_file_of_the_corpus_is_read_or_refused(target, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, os.environ.get(CACHE_VARIABLE, ""))
    monkeypatch.setattr(onnx_wire, "SMALL_BYTES", onnx_wire.SMALL_BYTES)
    files = [file for file in FILES if file.parent.name == target]
    check = TARGETS[target]()
    assert files
    for file in files:
        check(file.read_bytes())


# -- ONNX's own suite of operators


PROBLEMS = {"c": "known"}


@pytest.mark.slow
def test_one_case_in_twenty_answers_as_before_after_optimize_and_reload():
    verdicts = run_suite(every=20)
    assert find_surprises(verdicts) == ()
    assert sum(verdict.outcome == EQUAL for verdict in verdicts) > len(verdicts) / 2


@pytest.mark.parametrize(("error", "outcome"), [(0.0, EQUAL), (0.01, NOT_RUN)])
def test_a_wrong_answer_is_noticed(tmp_path, error, outcome):
    expected = np.arange(3, dtype=np.float32) + 1 + np.float32(error)
    case = SuiteCase(
        name="zero_inputs",
        model_name="zero_inputs",
        url=None,
        model_dir=None,
        model=zero_inputs(),
        data_sets=[([], [expected])],
        kind="node",
        rtol=1e-3,
        atol=1e-7,
    )
    assert check_case(case, tmp_path).outcome == outcome


@pytest.mark.manual
def test_every_case_answers_as_before_after_optimize_and_reload():
    verdicts = run_suite()
    assert find_surprises(verdicts) == ()
    assert sum(verdict.outcome == EQUAL for verdict in verdicts) > 1000
    assert {verdict.case for verdict in verdicts} >= LISTED.keys()


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict("a", DIFFERENT, "y: outside tolerance", "all"),
        Verdict("a", CRASHED, "died of SIGSEGV"),
        Verdict("a", EQUAL, "all: cannot load", "source"),
        Verdict("c", EQUAL, "", "all"),
    ],
)
def test_what_is_wrong_or_no_longer_wrong_is_told(verdict):
    (surprise,) = find_surprises([verdict], PROBLEMS)
    assert surprise.startswith(f"{verdict.case}: ")
