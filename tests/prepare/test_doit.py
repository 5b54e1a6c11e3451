"""The same build through doit: its tasks, its listing, its clean, and several models at once."""

import numpy as np
import pytest

from ortprep.runtime import load
from tests.builders import two_inputs, write_external_model
from tests.prepare.builders import (
    SHAPES,
    Project,
    all_tasks,
    answers,
    done,
    folding_net,
    is_intact,
    source_answers,
    stamps,
)


def test_doit_and_the_command_find_each_others_work_done(built):
    before = stamps(built.bundle())
    for task in ("prepare", "prepare:net", "package:net"):
        outcome = built.doit(task)
        assert (outcome.code, outcome.out) == (0, "")
        assert "0 done" in outcome.err
    assert built.doit().err == built.doit("prepare").err  # prepare is what doit does if it is not told
    assert stamps(built.bundle()) == before


def test_the_listing_says_what_every_task_is_for(built):
    listed = dict(
        line.split(maxsplit=1) for line in built.doit("list", "--all").out.splitlines() if line.strip()
    )
    expected = all_tasks() | {task.partition(":")[0] for task in all_tasks()}
    assert set(listed) == expected | {"prepare", "prepare:net"}
    assert all(listed.values())

    short = [line.split()[0] for line in built.doit("list").out.splitlines()]
    assert sorted(short) == [
        "fetch",
        "measure",
        "optimize",
        "package",
        "prepare",
        "verify",
    ]


@pytest.mark.slow
def test_a_single_task_brings_what_it_needs_and_no_more(project):
    assert done(project.doit("optimize:net/portable")) == {"fetch:net", "optimize:net/portable"}
    assert not project.bundle().exists()


def test_clean_shows_what_it_would_do_and_does_it(built):
    before = stamps(built.artifacts)
    shown = built.doit("clean", "-n")
    assert "prepare:net - executing 'Python: function remove_outcomes'" in shown.out
    assert stamps(built.artifacts) == before

    assert built.doit("clean", "prepare:net").code == 0
    assert not built.bundle().exists()
    assert set(built.explain()) == {task.replace(":net", "") for task in all_tasks()}
    assert [path for path in built.work().rglob("*") if path.is_file() and path.suffix != ".lock"] == []


@pytest.mark.slow
def test_clean_of_one_stage_makes_only_that_stage_new(built):
    assert built.doit("clean", "optimize:net/portable").code == 0
    assert built.explain()["optimize/portable"] == ["never done"]
    assert done(built.doit("optimize")) == {"optimize:net/portable"}


@pytest.mark.slow
def test_clean_of_everything_leaves_what_doit_did_not_make(built):
    own = built.artifacts / "README.md"
    own.write_text("mine")
    assert built.doit("clean").code == 0
    assert not built.bundle().exists()
    assert own.read_text() == "mine"
    assert (built.models / "net.onnx").exists()


@pytest.mark.manual
def test_several_models_built_at_once_are_each_right(tmp_path):
    project = Project(tmp_path / "project")
    project.add(folding_net(), "fold", inputs=SHAPES)
    project.write_spec("sum", inputs={"left": {"shapes": [[2, 4]]}})
    write_external_model(two_inputs(), project.models / "sum.onnx", location="sum/weights.bin")

    outcome = project.doit("-n", "4", "prepare")
    assert done(outcome) == all_tasks("fold") | all_tasks("sum")
    rng = np.random.default_rng(0)
    feeds = {
        "fold": {"x": rng.random((2, 64), np.float32)},
        "sum": {name: rng.random((2, 4), np.float32) for name in ("left", "right")},
    }
    for name, fed in feeds.items():
        expected = source_answers(project.models / f"{name}.onnx", fed)
        got = answers(load(project.bundle(name), check="golden", digests="full"), fed)
        for output, values in expected.items():
            np.testing.assert_allclose(got[output], values, rtol=1e-3, atol=1e-5)
        assert is_intact(project.bundle(name))
    assert project.explain() == {}


@pytest.mark.slow
def test_a_model_that_fails_does_not_keep_the_others_from_being_built(built):
    built.add(folding_net(seed=3), "bad", source={"path": "../models/none.onnx"})
    built.write_spec(inputs=SHAPES, verify={"rtol": 0.01})
    outcome = built.doit("--continue", "-n", "2", "verify")
    assert outcome.code != 0
    assert "FAILED fetch:bad" in outcome.err
    assert "not tried" in outcome.err.splitlines()[-1]
    assert "done verify:net/cpu" in outcome.err


def test_a_users_own_folder_in_a_bundles_place_is_neither_built_over_nor_cleaned(project):
    project.bundle().mkdir(parents=True)
    (project.bundle() / "model.onnx").write_text("precious")
    before = stamps(project.artifacts)
    built, cleaned = project.run("prepare"), project.doit("clean", "prepare:net")
    assert (built.code, built.out) == (2, "")
    for outcome in (built, cleaned):
        assert "a bundle would replace something that is not a bundle\n  net: expected nothing" in outcome.err
    assert cleaned.code != 0
    assert stamps(project.artifacts) == before
