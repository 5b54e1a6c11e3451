"""Laws of the runner: one model after the other, what is done is left, a failure stops what needs it."""

from pathlib import Path

import pytest

from ortprep.build import build_plan as planning
from ortprep.build.build_plan import build_plan, check_buildable, plan_specs
from ortprep.build.runner import run_builds
from ortprep.errors import SpecError
from ortprep.spec.models import ModelSpec, SourceSpec
from tests.build.fakes import Count, Shout, tasks
from tests.registry.builders import read_tree
from tests.runtime.builders import write_bundle


class Recorder:
    """An observer that writes down what it is told."""

    def __init__(self):
        self.told = []

    def __call__(self, event):
        if event.kind == "said":
            self.told.append(f"{event.task} said {event.text}")
        else:
            self.told.append(f"{event.kind} {event.task}{event.text and ': '}{event.text}".rstrip())

    def finished_tasks(self):
        return [line.removeprefix("finished ") for line in self.told if line.startswith("finished ")]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))


def test_a_failed_model_holds_up_no_other(tmp_path):
    recorder = Recorder()
    builds = (
        tasks(tmp_path, Shout(fails=True), Count(), name="bad"),
        tasks(tmp_path, Shout(), Count(), name="good"),
        tasks(tmp_path, Shout(), Count(), name="better"),
    )
    (error,) = run_builds(builds, recorder)
    assert error.message.startswith("shout of bad: lost its voice")
    assert error.hint == "drink tea"
    assert "skipped count:bad/cpu: shout:bad failed" in recorder.told
    # One model after the other: the first bundle is there before work on the next one begins.
    assert recorder.finished_tasks() == ["shout:good", "count:good/cpu", "shout:better", "count:better/cpu"]


# -- what is built: targets that are named or that the machine has, in places where nothing else is


def spec(targets, name="m"):
    return ModelSpec.model_validate({"name": name, "source": {"path": "m.onnx"}, "targets": targets})


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(planning, "unavailable_reason", {"cuda": "no NVIDIA driver"}.get)


@pytest.fixture
def gpu(no_gpu, monkeypatch):
    monkeypatch.setattr(planning, "unavailable_reason", lambda _: None)


def test_auto_takes_what_is_there():
    plan = build_plan(spec("auto"))
    assert (plan.targets, plan.variants) == (("cpu",), ("cpu", "portable"))


@pytest.mark.usefixtures("gpu")
def test_the_fastest_comes_first_and_one_target_alone_leaves_the_others_out():
    assert build_plan(spec("auto")).targets == ("cuda", "cpu")
    plan = build_plan(spec("auto"), only="cpu")
    assert plan.targets == ("cpu",)


NOWHERE = "targets: [cpu]   # in the spec of m; every machine has it"


@pytest.mark.parametrize(
    ("targets", "options", "told", "hint"),
    [
        (["cpu", "cuda"], {}, "cuda: no NVIDIA driver", "ortprep prepare m --target cpu"),
        (["cuda"], {}, "not available", NOWHERE),
        ("auto", {"only": "cuda"}, "no NVIDIA driver", "ortprep prepare m --target cpu"),
        (["cpu"], {"only": "cuda"}, "no such target in m: cuda", "add it to targets: of the spec, or run: "),
        (["cpu"], {"only": "gpu"}, "no such target in m: gpu", "ortprep prepare m"),
    ],
)
def test_a_named_target_that_is_not_there_is_an_error_with_the_way_out(targets, options, told, hint):
    with pytest.raises(SpecError, match=told) as caught:
        build_plan(spec(targets), **options)
    assert (caught.value.hint or "").startswith(hint)


def test_problems_of_all_models_are_reported_at_once(tmp_path):
    specs = [spec(["cuda"], "a"), spec(["cpu"], "b"), spec(["cuda"], "c")]
    with pytest.raises(SpecError, match=r"cuda of a(.|\n)*cuda of c"):
        plan_specs(specs, tmp_path)


# -- A bundle replaces an older bundle and nothing else; what a user put in its place stays


def spec_in(folder, *, path="net.onnx", name="net"):
    return ModelSpec(name=name, source=SourceSpec(path=path)).located_in(folder)


def _cleared(folder):
    folder.rmdir()
    return folder


def _damaged(file):
    (write_bundle(file.parents[1]) / "manifest.json").unlink()
    return file


def _newer(folder):
    (folder / "loader.json").unlink()
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": "1.', '"schema_version": "9.', 1))


REPLACEABLE = {
    "nothing": Path.rmdir,
    "an empty folder": lambda folder: None,
    "a bundle": write_bundle,
    "a bundle without manifest": lambda folder: (write_bundle(folder) / "manifest.json").unlink(),
    "a bundle without loader config": lambda folder: (write_bundle(folder) / "loader.json").unlink(),
    "a damaged bundle": lambda folder: (write_bundle(folder) / "loader.json").write_text("?"),
}

PRECIOUS = {
    "a model": lambda folder: (folder / "model.onnx").write_text("precious"),
    "another program's manifest": lambda folder: (folder / "manifest.json").write_text('{"name": "app"}'),
    "another program's loader": lambda folder: (folder / "loader.json").write_text('{"name": "app"}'),
    "a file in a bundle": lambda folder: (write_bundle(folder) / "labels.txt").write_text("precious"),
    "a file in a damaged bundle": lambda folder: _damaged(folder / "cpu/labels.txt").write_text("precious"),
    "a link in a bundle": lambda folder: (write_bundle(folder) / "data").symlink_to("/tmp"),
    "a newer version's": lambda folder: _newer(write_bundle(folder)),
    "a folder in the place of a record": lambda folder: (folder / "loader.json").mkdir(),
    "a file": lambda folder: _cleared(folder).write_text("precious"),
}


@pytest.mark.parametrize("put", REPLACEABLE.values(), ids=REPLACEABLE)
def test_what_a_build_left_or_nothing_may_be_replaced(tmp_path, put):
    (tmp_path / "net").mkdir()
    put(tmp_path / "net")
    before = read_tree(tmp_path)
    check_buildable([spec_in(tmp_path)], tmp_path)
    assert read_tree(tmp_path) == before, "checking replaces nothing yet"


@pytest.mark.attack
@pytest.mark.parametrize("put", PRECIOUS.values(), ids=PRECIOUS)
def test_a_build_replaces_no_file_that_it_did_not_write(tmp_path, put):
    (tmp_path / "net").mkdir()
    put(tmp_path / "net")
    with pytest.raises(SpecError, match=f"expected nothing, .* at {tmp_path / 'net'}, got ") as caught:
        check_buildable([spec_in(tmp_path, name="other"), spec_in(tmp_path)], tmp_path)
    assert f"mv {tmp_path / 'net'} {tmp_path / 'net'}.mine" in (caught.value.hint or "")


@pytest.mark.parametrize("inside", ["net/cpu", ".work/net/fetch"])
def test_a_source_is_never_in_what_its_own_build_replaces(tmp_path, inside):
    write_bundle(tmp_path / "net")
    with pytest.raises(SpecError, match="expected its source outside"):
        check_buildable([spec_in(tmp_path, path=f"{inside}/net.onnx")], tmp_path)
    (tmp_path / inside).mkdir(parents=True, exist_ok=True)
    (tmp_path / "link").symlink_to(inside)
    with pytest.raises(SpecError, match="expected its source outside"):
        check_buildable([spec_in(tmp_path, path="link/net.onnx")], tmp_path)


def test_a_source_may_be_in_the_bundle_of_a_model_that_is_not_built(tmp_path):
    write_bundle(tmp_path / "other")
    source = "other/cpu/linear_optimized.onnx"
    check_buildable([spec_in(tmp_path, path=source)], tmp_path)
    with pytest.raises(SpecError, match="expected its source outside"):
        check_buildable([spec_in(tmp_path, path=source, name="other")], tmp_path)


@pytest.mark.attack
@pytest.mark.parametrize(
    "place", ["", ".work", ".work/net", ".work/net/locks", ".work/net/fetch", ".work/net/receipts/a", "net"]
)
def test_links_in_an_artifacts_folder_that_a_clone_brings_are_refused(tmp_path, place):
    """Through them a build would write, overwrite and delete in the user's home."""
    home = tmp_path / "home"
    write_bundle(home)
    link = tmp_path / "artifacts" / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home)
    with pytest.raises(SpecError, match=f"link where files are written: {link}\n") as caught:
        check_buildable([spec_in(tmp_path)], tmp_path / "artifacts")
    assert caught.value.hint == f"rm {link}"
