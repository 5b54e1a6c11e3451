"""The benchmarks: their arithmetic, what the fuzzer found, and that every folder of tests is collected."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from bench import precision
from bench.dropin import PLAIN as PLAIN_RUN
from bench.dropin import RUN, VARIABLES, agrees, report
from bench.fuzz import CORPUS, TARGETS
from bench.init import InitOutcome, add_outcomes, main, summarize, try_models
from bench.load_cost import (
    FALLBACK,
    HAND,
    IMPORTED,
    LOAD,
    PLAIN,
    SAME_FILE,
    compare,
    judge,
    summarise_arm,
)
from bench.load_cost_tables import performance_tables, readme_table, replace_between
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
from ortprep.bundle.codec import encode
from ortprep.bundle.file_memory import CACHE_VARIABLE
from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.errors import StageError
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.spec.reading import read_specs
from tests import builders as models
from tests.init.builders import impossible
from tests.runtime.builders import sample, write_bundle


def runs(*, first_ms=900.0, answer="total"):
    """Three processes on a machine that changes its speed."""
    return [
        {"first_ms": first_ms * speed, "whole_ms": 1200 * speed, "call_ms": 80 * speed, "answer": answer}
        for speed in (1.0, 1.4, 0.9)
    ]


@pytest.mark.parametrize(
    ("first_ms", "verdict"), [(500.0, "better"), (900.0, "no difference"), (1500.0, "worse")]
)
def test_a_way_is_better_or_worse_beyond_the_noise_only(first_ms, verdict):
    found = report({PLAIN_RUN: runs(), RUN: runs(first_ms=first_ms), VARIABLES: runs()})
    assert found["figures"]["first_ms"][RUN]["verdict"] == verdict
    assert found["figures"]["first_ms"][RUN]["to_plain"] == pytest.approx(first_ms / 900)
    assert found["figures"]["whole_ms"][VARIABLES]["verdict"] == "no difference"


def test_one_answer_that_differs_is_told():
    assert report({PLAIN_RUN: runs(), RUN: runs(), VARIABLES: runs()})["answers_agree"]
    assert not report({PLAIN_RUN: runs(), RUN: runs(answer="tota1"), VARIABLES: runs()})["answers_agree"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, "a", {"x": 0.5}], [1, "a", {"x": 0.50001}], True),
        ([0.5], [0.6], False),
        ([1], [2], False),
        ([1, 2], [1], False),
        ({"x": 1}, {"y": 1}, False),
    ],
)
def test_numbers_agree_within_rounding_and_all_else_exactly(one, other, expected):
    assert agrees(one, other) is expected


# -- what `bench.init` says of a folder of models


def outcome(model, group, *, verified):
    return InitOutcome(
        model,
        group,
        1,
        written=True,
        ran=True,
        verified=verified,
        first_verified=verified,
        init_s=1.0,
        said="",
    )


def test_every_group_is_counted_on_its_own():
    outcomes = [
        outcome("a.onnx", "seen", verified=True),
        outcome("b.onnx", "unseen", verified=True),
        outcome("c.onnx", "unseen", verified=False),
    ]
    assert summarize(outcomes) == {
        "seen": {"models": 1, "written": 1, "ran": 1, "verified": 1, "first_verified": 1},
        "unseen": {"models": 2, "written": 2, "ran": 2, "verified": 1, "first_verified": 1},
    }


def test_a_new_row_keeps_the_first_try_of_its_model():
    failed, mended = (outcome("b.onnx", "unseen", verified=one) for one in (False, True))
    other = outcome("a.onnx", "exported", verified=True)
    assert add_outcomes([failed], [mended, other]) == [other, replace(mended, first_verified=False)]


def test_rows_of_an_earlier_result_are_kept(tmp_path):
    result, row = tmp_path / "init.json", outcome("a.onnx", "demo", verified=True)
    result.write_text(json.dumps({"models": [asdict(row)]}), encoding="utf-8")
    (tmp_path / "models").mkdir()
    assert main([str(tmp_path / "models"), "--out", str(result)]) == 0
    assert json.loads(result.read_text(encoding="utf-8"))["models"] == [asdict(row)]


@pytest.mark.manual
def test_models_are_taken_as_far_as_they_come(tmp_path):
    models.write_model(models.conv_net(), tmp_path / "models" / "good" / "net.onnx")
    models.write_model(impossible(), tmp_path / "models" / "bad" / "odd.onnx")
    found = {one.model: one for one in try_models(tmp_path / "models", tmp_path / "work")}
    good, bad = found["good/net.onnx"], found["bad/odd.onnx"]
    assert (good.group, good.written, good.ran, good.verified, good.said) == ("good", True, True, True, "")
    assert (bad.written, bad.ran, bad.verified) == (True, False, False)
    assert "which shape does input x" in bad.said


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
        "load": load(bundle, target="cpu"),
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
    names: dict[str, object] = {}
    exec(f"{same_file(bundle).imports}\n{same_file(bundle).session}", names)
    made = names["options"]
    assert made.intra_op_num_threads == 1  # type: ignore[attr-defined]
    assert made.get_session_config_entry("session.disable_prepacking") == "1"  # type: ignore[attr-defined]
    assert made.graph_optimization_level.name == "ORT_ENABLE_BASIC"  # type: ignore[attr-defined]


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


def test_load_adds_what_its_session_comes_later_than_one_of_the_same_file():
    later = [
        replace(one, ready_ms=one.ready_ms + 5, import_ms=2.0, init_ms=one.init_ms + 1, processor_ms=13.0)
        for one in starts(100.0)
    ]
    figures = compare({PLAIN: starts(120.0), SAME_FILE: starts(100.0), LOAD: later, IMPORTED: later})
    assert figures["load_adds_ms"] == pytest.approx(3.0)
    assert figures["load_adds_to_process_ms"] == pytest.approx(5.0)
    assert figures["load_adds_processor_ms"] == pytest.approx(4.0)


def test_one_slow_model_misses_its_goal_though_the_mean_reaches_it():
    verdicts = judge("small", {"a": {"load_sooner": 2.0}, "b": {"load_sooner": 0.9}})
    assert [(verdict.reached, pytest.approx(verdict.got)) for verdict in verdicts] == [
        (True, 1.8**0.5),
        (False, 0.9),
    ]


def test_arms_that_were_left_out_have_no_verdict():
    assert judge("large", {"a": {"load_steady": 1.01}})[0].goal.startswith("later run")


def test_specs_of_the_small_models_are_specs(tmp_path):
    write_specs(small_specs(SMALL_MODELS, tmp_path), tmp_path / "configs", defaults=DEFAULTS)
    assert {spec.name for spec in read_specs(tmp_path / "configs")} == set(SMALL_MODELS)


def test_tables_take_the_place_between_their_markers_and_nothing_else():
    page = "before\n<!-- x -->\nold\nlines\n<!-- end of x -->\nafter\n"
    once = replace_between(page, "x", "| new |")
    assert once == "before\n<!-- x -->\n| new |\n<!-- end of x -->\nafter\n"
    assert replace_between(once, "x", "| new |") == once
    with pytest.raises(ValueError, match="no markers"):
        replace_between(page, "y", "| new |")


def measured(kind, arms):
    """A section of the report, with two models whose arms come twice as soon as plain ONNX Runtime."""
    results = {arm: starts(50.0) for arm in arms} | {PLAIN: starts(100.0)}
    figures = {name: compare(results) for name in ("magika", "resnet50")}
    return {
        "source_mb": dict.fromkeys(figures, 3.2),
        "ratios": figures,
        "verdicts": encode(tuple(judge(kind, figures))),
        "models": {name: {arm: summarise_arm(of_arm) for arm, of_arm in results.items()} for name in figures},
    }


def test_tables_have_every_model_and_the_means():
    arms = (LOAD, HAND, SAME_FILE, IMPORTED, FALLBACK)
    report = {
        "small": measured("small", arms),
        "large": measured("large", arms),
    }
    table = readme_table(report["small"])
    assert "| Magika, 3 MB, plain 100 ms | 2.00× [2.00–2.00] | 2.00× [2.00–2.00] | 1.00× |" in table
    assert "| **geometric mean of 2** | 2.00× | 2.00× | 1.00× |" in table
    details = performance_tables(report)
    assert "| magika, 3.2 MB | 100, 5.0 ms | 50 ms (2.00×) | 1.00× |" in details
    assert (
        "| process start to first result, times sooner, geometric mean, at least 1.1 | 2.00 | reached |"
        in details
    )


# -- the comparison of precisions keeps to its own folder


@pytest.mark.parametrize("given", [True, False])
def test_the_environment_is_below_the_folder_and_a_temporary_one_is_removed(tmp_path, monkeypatch, given):
    folder = tmp_path / "work"
    folder.mkdir()

    def refuse(environment: Path, requirements: object) -> Path:
        assert environment.parent == folder
        raise StageError("cannot install RapidOCR")

    monkeypatch.setattr(precision, "make_environment", refuse)
    monkeypatch.setattr(precision, "mkdtemp", lambda **_options: str(folder))
    assert precision.main(["--folder", str(folder)] if given else []) == StageError.exit_code
    assert folder.exists() == given


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
