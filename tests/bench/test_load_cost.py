from dataclasses import replace

import pytest

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
from ortprep.bundle.codec import encode
from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.spec.reading import read_specs
from tests.runtime.builders import sample, write_bundle


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
    assert "| **mean of 2** | 2.00× | 2.00× | 1.00× |" in table
    details = performance_tables(report)
    assert "| magika, 3.2 MB | 100, 5.0 ms | 50 ms (2.00×) | 1.00× |" in details
    assert (
        "| process start to first result, times sooner, geometric mean, at least 1.1 | 2.00 | reached |"
        in details
    )
