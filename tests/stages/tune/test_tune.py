import dataclasses
import shutil

import numpy as np
import pytest

from ortprep.bundle.loader_config import VersionRange
from ortprep.children.answers import Answer, Answers
from ortprep.errors import PipelineError
from ortprep.runtime.loading.session import CPU, build_session, default_plan
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import Plan, TaskId
from ortprep.stages.core.graph_walk import walk_operators
from ortprep.stages.core.samples import Sample
from ortprep.stages.tune.search_context import Artefacts, checked_samples, readable_by
from ortprep.stages.tune.stage import TuneStage
from ortprep.stages.verify.reference import ReferenceAnswers, part_of
from tests import builders as models
from tests.stages.optimize.builders import Build


def spec(**sections):
    return ModelSpec.model_validate(
        {"name": "net", "source": {"path": "model.onnx"}, "targets": ["cpu"], **sections}
    )


def plan(**sections):
    return Plan(spec(**sections), ("cpu",))


def test_no_trials_are_no_task():
    assert TuneStage().variants(plan()) == ("cpu",)
    assert TuneStage().variants(plan(tune={"max_trials": 0})) == ()


def test_a_target_is_searched_once_it_is_verified():
    required = TuneStage().requires(Plan(spec(), ("cuda",)), "cuda")
    assert required == (
        TaskId("fetch"),
        TaskId("optimize", "cuda"),
        TaskId("verify", "cuda"),
        TaskId("verify", "portable"),
    )
    assert len(set(TuneStage().requires(plan(), "cpu"))) == 3


def test_features_of_a_graph_are_those_of_its_bodies_too():
    assert "MatMul" in {node.op_type for node in walk_operators(models.loop_net())}


def test_onnx_runtimes_own_format_is_for_the_version_that_wrote_it(artefacts):
    versions = VersionRange("1.23", "1.99")
    written = artefacts.get("ort")
    major, minor, *_ = written.saved.onnxruntime.split(".")
    assert readable_by(written, versions) == VersionRange(f"{major}.{minor}", f"{major}.{int(minor) + 1}")
    assert readable_by(artefacts.get("mapped"), versions) == versions


@pytest.fixture(scope="module")
def optimized(tmp_path_factory):
    build = Build(tmp_path_factory.mktemp("optimized"))
    models.write_model(models.matmul_net(size=128), build.source / "model.onnx")
    assert build.optimize(inputs={"x": {"shapes": [[1, 128]]}}).step == "all"
    return build


@pytest.fixture
def context(optimized, tmp_path):
    optimized.said.clear()
    return context_in(optimized, tmp_path)


def context_in(optimized, folder):
    return dataclasses.replace(optimized.context("cpu", {}), folder=folder)


def artefacts_of(optimized, context):
    return Artefacts(context, optimized.folder, context.folder / "forms")


@pytest.fixture(scope="module")
def artefacts(optimized, tmp_path_factory):
    """Every test's, so that each form is written once."""
    return artefacts_of(optimized, context_in(optimized, tmp_path_factory.mktemp("artefacts")))


def test_each_shape_is_measured_by_a_sample_that_judges_if_there_is_one():
    shapes = ("x=[1]", "x=[1]", "x=[2]", "x=[1]")  # the last one judges
    samples = tuple(Sample(f"{number}.npz", shape, 1, number) for number, shape in enumerate(shapes))
    answers = Answers((), (), tuple((Answer("y", sample.file),) for sample in samples))
    every = ReferenceAnswers(samples, answers, ())
    judging = part_of(every, [False, False, False, True])
    assert [file for file, _ in checked_samples(every, every)] == ["0.npz", "2.npz"]
    assert [file for file, _ in checked_samples(every, judging)] == ["3.npz", "2.npz"]


def test_the_verified_file_is_taken_as_it_is(optimized, context):
    assert artefacts_of(optimized, context).get("mapped").folder == optimized.folder
    assert not (context.folder / "forms").exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["prepacked", "ort"])
def test_every_form_answers_as_the_verified_file_to_the_bit(artefacts, form):
    feeds = {"x": np.random.default_rng(0).random((3, 128), np.float32)}
    found = [
        build_session(default_plan(str(artefacts.get(name).path), CPU, level="ORT_DISABLE_ALL")).run(
            None, feeds
        )[0]
        for name in ("mapped", form)
    ]
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.slow
def test_files_that_cannot_be_read_are_no_form_and_leave_nothing(optimized, context, tmp_path):
    prepared = tmp_path / "prepared"
    shutil.copytree(optimized.folder, prepared)
    artefacts = Artefacts(context, prepared, context.folder / "forms")
    artefacts.get("mapped")
    (prepared / "net_optimized.onnx").write_bytes(b"damaged")
    with pytest.raises(PipelineError):
        artefacts.get("ort")
    assert [path.name for path in (context.folder / "forms").iterdir()] == []
