"""Records of an application become specs that keep its inputs and options, or the reason for none."""

from dataclasses import replace
from pathlib import Path

import pytest

from ortprep.adopt.adoption import adopt_models
from ortprep.adopt.model_use import MAX_SHAPES, merge_uses, options_of
from ortprep.adopt.observation import FeedRecord, ModelRecord, ProcessRecord
from ortprep.adopt.recorder import read_records
from ortprep.bundle.codec import encode, format_json
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.errors import SpecError
from ortprep.init import init_spec
from ortprep.options import NEWEST
from ortprep.spec.validation import parse_spec
from tests.builders import conv_net, embedding, sequence_input, write_model
from tests.runtime.builders import weights_of, write_linear

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
DEFAULTS = SessionOptionsRecord("ORT_ENABLE_ALL")
ONE_THREAD = SessionOptionsRecord("ORT_ENABLE_ALL", {"intra_op_num_threads": 1})


def feed(runs=1, /, values=None, **shapes):
    return FeedRecord(runs, shapes, values or {})


def model(*feeds, others=0, limits=None, **changes):
    """Returns a model's record with the runs of these feeds, and others of other shapes."""
    runs = others + sum(one.runs for one in feeds)
    feeds = tuple(replace(one, limits=limits or {}) for one in feeds)
    plain = ModelRecord("/m.onnx", None, 1, 1, DEFAULTS, (), (CPU,), None, {}, 1, runs, feeds)
    return replace(plain, **changes)


def record_of(path, *feeds, **changes):
    status = path.stat()
    file = {"path": str(path), "size_bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    return model(*feeds, **file, **changes)


def adopt(folder, *models):
    return adopt_models([ProcessRecord("1.31.1", models)], folder, folder / "configs")


def options_said(use):
    """Returns the options of a spec, which a build takes."""
    sections, left_out = options_of(use, version=NEWEST)
    shapes = {name: {"shapes": [list(one) for one in seen.shapes]} for name, seen in use.inputs.items()}
    parse_spec({"name": "m", "source": {"path": "m.onnx"}, "inputs": shapes, **sections}, onnxruntime=NEWEST)
    return sections, left_out


def test_runs_and_limits_of_all_processes_count_the_most_frequent_shapes_first():
    first = model(feed(2, x=(1, 8)), feed(3, x=(1, 9)), loads=2, limits={"x": (-0.123456, 1.0)})
    second = model(feed(4, x=(1, 8)), limits={"x": (0.0, 2.000001)}, others=3, options=ONE_THREAD)
    use = merge_uses([first, second])
    assert (use.inputs["x"].shapes, use.inputs["x"].range) == (((1, 8), (1, 9)), (-0.123456, 2.000001))
    assert (use.loads, use.runs, use.runs_per_load) == (3, 12, 4)
    assert (use.shapes, use.model.options) == (2, ONE_THREAD)


def test_the_largest_shapes_are_in_the_spec_however_rare():
    use = merge_uses([model(*(feed(100 - size, x=(1, size)) for size in range(1, 60)))])
    assert len(use.inputs["x"].shapes) == MAX_SHAPES
    assert use.inputs["x"].shapes == ((1, 1), (1, 2), (1, 3), (1, 59))
    assert use.shapes == 59


@pytest.mark.parametrize(
    ("first", "second", "shapes", "values", "limits"),
    [
        ((16_000,), (8000,), 1, (16_000,), None),  # that rate goes with that shape
        ((16_000,), (8000, 16_000), 2, (16_000,), None),
        ((16_000,), (), 2, (16_000,), None),  # more than were kept
        ((0.5,), (0.75,), 2, None, (1, 9)),  # what a fraction is seldom depends on the shape
    ],
)
def test_values_are_those_that_suit_every_shape(first, second, shapes, values, limits):
    feeds = feed(9, {"n": first}, x=(1, 5), n=(1,)), feed(2, {"n": second}, x=(1, 6), n=(1,))
    use = merge_uses([model(*feeds, limits={"n": (1, 9)})])
    assert use.inputs["x"].shapes == ((1, 5), (1, 6))[:shapes]
    assert (use.inputs["n"].values, use.inputs["n"].range) == (values, limits)
    assert (options_said(use)[1] == []) == (shapes == 2)


def test_what_differs_from_defaults_is_fixed_in_runtime_and_nothing_else_is():
    attributes = {"enable_cpu_mem_arena": False, "intra_op_num_threads": 2}
    options = SessionOptionsRecord("ORT_ENABLE_ALL", attributes, {"session.intra_op.allow_spinning": "0"})
    runs = feed(6, x=(6,)), feed(4, x=(4,))
    assert options_said(merge_uses([model(*runs, loads=2, options=options)])) == (
        {
            "targets": ["cpu"],
            "runtime": {**attributes, "session_config": {"session.intra_op.allow_spinning": "0"}},
            "tune": {"runs_per_load": 5},
        },
        [],
    )
    assert options_said(merge_uses([model(*runs)]))[0].keys() == {"targets", "tune"}


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("net.onnx", lambda path: path.unlink(), "can no longer be read: No such file"),
        ("net.onnx", lambda path: path.write_bytes(b"another"), "changed since the application loaded it"),
        ("net.ort", lambda _: None, "own format"),
    ],
)
def test_a_file_that_no_spec_can_name_gets_none(tmp_path, name, change, reason):
    path = write_model(conv_net(), tmp_path / name)
    record = record_of(path)
    change(path)
    [found] = adopt(tmp_path, record)
    assert (found.name, reason in found.problem) == (None, True)


def test_what_a_build_cannot_prepare_gets_no_spec(tmp_path):
    sequence = write_model(sequence_input(), tmp_path / "sequence.onnx")
    [found] = adopt(tmp_path, record_of(sequence))
    assert (found.name, "expected a tensor" in found.problem) == (None, True)
    assert not list((tmp_path / "configs").glob("*.yaml"))


def test_equal_graphs_with_other_external_weights_are_other_models(tmp_path):
    paths = [write_linear(tmp_path / f"{seed}/linear.onnx", weights_of(seed % 2))[0] for seed in (1, 2, 3)]
    assert len({path.read_bytes() for path in paths}) == 1
    found = adopt(tmp_path, *map(record_of, paths))
    assert [(one.model, one.use.loads) for one in found] == [(str(paths[0]), 2), (str(paths[1]), 1)]


@pytest.mark.parametrize("bad", [b"{", b"{}", format_json({"x": "y" * 2**23})])
def test_a_bad_record_is_left_out_with_a_message(tmp_path, bad):
    good = ProcessRecord("1.31.1", ())
    (tmp_path / "1.json").write_bytes(bad)
    said = []
    with pytest.raises(SpecError, match="no record can be read"):
        read_records(tmp_path, said.append)
    (tmp_path / "2.json").write_bytes(format_json(encode(good)))
    assert read_records(tmp_path, said.append) == (good,)
    assert len(said) == 2


def test_real_inputs_are_kept_from_git_until_others_replace_them(tmp_path):
    for number, content in enumerate((b"an input", b"another")):
        (tmp_path / f"{number}.npz").write_bytes(content)
    record = record_of(write_model(conv_net(), tmp_path / "net.onnx"), kept=("0.npz", "1.npz"))
    processes = [ProcessRecord("1.31.1", (record,))]
    configs = tmp_path / "configs"
    [found] = adopt_models(processes, tmp_path, configs, max_inputs=4)
    assert (found.samples, (configs / "samples" / ".gitignore").read_text()) == (2, "*\n")
    kept, spec = configs / "samples" / str(found.name), configs / f"{found.name}.yaml"
    before = [b"an input", b"another"]
    for force in (False, True):
        adopt_models(processes, tmp_path, configs, force=force)
        assert [path.read_bytes() for path in sorted(kept.iterdir())] == before
        assert f'samples: "samples/{found.name}/*.npz"' in spec.read_text()
    adopt_models(processes, tmp_path, configs, force=True, max_inputs=1)
    assert [path.name for path in kept.iterdir()] == ["0000.npz"]


@pytest.mark.attack
@pytest.mark.parametrize(
    "place", ["models", "models/model-0123456789ab.onnx", "samples", "samples/.gitignore", "samples/net"]
)
def test_nothing_is_written_through_links_of_a_strangers_folder(tmp_path, place):
    (tmp_path / "0.npz").write_bytes(b"an input")
    path = write_model(conv_net(), tmp_path / "0123456789abcdef.onnx")
    if place.startswith("models"):
        record = model(path=None, saved=path.name, size_bytes=1)
    else:
        record = record_of(path.rename(tmp_path / "net.onnx"), kept=("0.npz",))
    link, outside = tmp_path / "configs" / place, tmp_path / "outside"
    outside.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(outside if link.suffix == "" and link.name != ".gitignore" else outside / "written")
    processes = [ProcessRecord("1.31.1", (record,))]
    [found] = adopt_models(processes, tmp_path, tmp_path / "configs", max_inputs=4)
    assert (found.name, found.problem.splitlines()[0]) == (None, f"link where files are written: {link}")
    assert not list(outside.iterdir())


@pytest.mark.attack
def test_a_model_that_was_only_in_memory_is_kept_for_this_user_alone(tmp_path):
    write_model(embedding(), tmp_path / "0123456789abcdef.onnx")
    adopt(tmp_path, model(path=None, saved="0123456789abcdef.onnx", size_bytes=1))
    (kept,) = (tmp_path / "configs" / "models").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.attack
def test_the_default_folder_of_specs_is_no_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    Path("configs").symlink_to(outside)
    path = write_model(embedding(), tmp_path / "net.onnx")
    (tmp_path / "0.npz").write_bytes(b"an input")
    processes = [ProcessRecord("1.31.1", (record_of(path, kept=("0.npz",)),))]
    with pytest.raises(SpecError, match="link where files are written: configs"):
        adopt_models(processes, tmp_path, Path("configs"), max_inputs=4)
    with pytest.raises(SpecError, match="link where files are written: configs"):
        init_spec(path).write()
    assert not list(outside.iterdir())


@pytest.mark.attack
def test_git_ignores_real_inputs_whatever_a_clone_says(tmp_path):
    (tmp_path / "0.npz").write_bytes(b"an input")
    record = record_of(write_model(embedding(), tmp_path / "net.onnx"), kept=("0.npz",))
    ignored = tmp_path / "configs/samples/.gitignore"
    ignored.parent.mkdir(parents=True)
    ignored.write_text("!*\n")
    adopt_models([ProcessRecord("1.31.1", (record,))], tmp_path, tmp_path / "configs", max_inputs=4)
    assert ignored.read_text() == "*\n"
