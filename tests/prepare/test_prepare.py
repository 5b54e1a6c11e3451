"""From a spec to `load`; a second run does nothing; a third does what changed."""

import numpy as np
import pytest

from bench.big_model import prepare_big_model
from ortprep.bundle.file_links import link_or_copy
from ortprep.runtime import load
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.stages.package import prepared_variants
from tests.builders import if_net, write_model
from tests.prepare.builders import (
    ALL_TASKS,
    AS_PREPARED,
    SHAPES,
    Project,
    answers,
    done,
    folding_net,
    is_intact,
    preferred_model,
    source_answers,
    stamps,
)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_loaded_bundle_answers_as_the_source_does(first_build, batch):
    project, _ = first_build
    feeds = {"x": np.random.default_rng(7).random((batch, 64), np.float32)}
    expected = source_answers(project.models / "net.onnx", feeds)
    got = answers(load(project.bundle(), check="golden", digests="full"), feeds)
    assert list(got) == list(expected)
    np.testing.assert_allclose(got["y"], expected["y"], rtol=1e-3, atol=1e-5)


def test_the_first_build_does_every_task_and_leaves_no_unfinished_work(first_build):
    project, outcome = first_build
    assert done(outcome) == ALL_TASKS
    assert outcome.err.endswith("7 done, 0 up to date\n")
    assert outcome.out == ""
    assert is_intact(project.bundle())
    assert project.leftovers() == []


def test_a_second_run_writes_nothing(built):
    built.call("explain")  # the copy's digests are now known
    before = stamps(built.artifacts)
    outcome = built.call("prepare")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "0 done, 7 up to date\n")
    assert stamps(built.artifacts) == before
    assert built.explain() == {}


def test_a_replaced_model_and_an_option_for_jobs_are_named_as_reasons(built):
    built.write_spec(inputs=SHAPES, runtime={"intra_op_num_threads": 1})
    reasons = built.explain()
    assert reasons["optimize/cpu"] == ["runtime.intra_op_num_threads: was None, is 1"]
    assert "fetch" not in reasons
    write_model(folding_net(seed=1), built.models / "net.onnx")
    reasons = built.explain()
    assert [line.partition(":")[0] for line in reasons["fetch"]] == ["source.digest"]
    assert set(reasons) == {task.replace(":net", "") for task in ALL_TASKS}


@pytest.mark.slow
def test_a_damaged_bundle_is_put_together_again_without_other_work(built):
    name = preferred_model(built.bundle())
    (built.bundle() / name).unlink()
    assert [reason.partition(":")[0] for reason in built.explain()["package"]] == [name]
    assert done(built.call("prepare")) == {"package:net"}
    assert is_intact(built.bundle())


def test_a_spec_taken_away_leaves_its_bundle(built):
    (built.configs / "net.yaml").rename(built.root / "net.yaml")
    built.add(folding_net(), "other", inputs=SHAPES)
    assert done(built.doit("fetch")) == {"fetch:other"}
    assert is_intact(built.bundle())


# -- a model larger than most machines want to hold twice: 2.5 GiB of weights in external data


@pytest.mark.manual
def test_a_model_of_2_5_gib_is_prepared_and_loaded_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    figures = prepare_big_model(tmp_path, size_bytes=int(2.5 * 2**30))
    assert figures["weights_gib"] == 2.5
    assert figures["parent_peak_mib"] < 300
    assert figures["children_peak_over_model"] < 2.2
    assert figures["load_peak_over_model"] < 2.2


# -- branches with external data of their own, whose files a bundle may not link


@pytest.fixture
def branching(tmp_path):
    """A project with such a model, not built. Stages are tested with models of every kind."""
    project = Project(tmp_path / "project")
    project.add(if_net(size=4096), inputs={"x": {"shapes": [[2, 4096]]}}, tune=AS_PREPARED)
    return project


@pytest.mark.slow
def test_branches_with_data_of_their_own_answer_to_the_bit(branching):
    assert branching.run("prepare").code == 0
    assert branching.run("check", str(branching.bundle())).code == 0
    for target in (None, "portable"):
        assert load(branching.bundle(), target=target, check="golden", digests="full")
    golden = read_tensors(branching.bundle() / "golden.npz")
    feeds = {name.removeprefix("input:"): golden[name] for name in golden if name.startswith("input:")}
    expected = source_answers(branching.models / "net.onnx", feeds)
    got = answers(load(branching.bundle()), feeds)
    assert all(np.array_equal(got[output], values) for output, values in expected.items())


@pytest.mark.slow
def test_a_bundle_that_does_not_load_is_never_published(branching, monkeypatch):
    def link(model, destination):
        for path in model.parent.iterdir():
            link_or_copy(path, destination.parent / path.name)

    monkeypatch.setattr(prepared_variants, "share_model", link)
    outcome = branching.call("prepare")
    assert outcome.code == 1
    assert "package of net: the bundle cannot be used" in outcome.err
    assert "hard link" in outcome.err
    assert not branching.bundle().exists()
