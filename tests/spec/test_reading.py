"""Laws of spec files: what is wrong is told, all of it, where it stands."""

import json
import os

import numpy as np
import pytest

from ortprep.errors import SpecError
from ortprep.spec import reading
from ortprep.spec.models import resolved_spec
from ortprep.spec.reading import make_spec, override, read_spec, read_specs

GOOD = "name: good\nsource: {path: resnet50.onnx}\n"


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problems_of(folder, text):
    """Returns the lines of the error that a spec gives, without the folder."""
    path = write(folder, "x.yaml", text)
    with pytest.raises(SpecError) as caught:
        read_spec(path)
    assert caught.value.hint
    return told(caught.value, folder)


def told(error, folder):
    _, *lines = error.message.replace(f"{folder}/", "").splitlines()
    return [line.strip() for line in lines]


WRONG = {
    "verify: {seed: many}": "3: verify.seed: expected a valid integer, got 'many'",
    "verify: {rtol: -1}": "3: verify.rtol: expected greater than or equal to 0, got -1",
    "verify: {rtoll: 1}": "3: verify.rtoll: unknown key; did you mean 'rtol'?",
    "verify:\n  outputs:\n    y: {rtol: 1}": "5: verify.outputs.y.atol: missing",
    "on: {}": "3: on: unknown key; expected one of name, source, inputs",
    "optimize:": "3: optimize: expected a mapping, got nothing",
    "optimize: {level: max}": "3: optimize.level: expected 'all', 'extended' or 'basic', got 'max'",
    "targets:\n- cpu\n- gpu": "5: targets[1]: expected 'cpu' or 'cuda', got 'gpu'",
    "targets: [cpu, cpu]": "3: targets: expected each once, got cpu, cpu",
    "inputs: {a/0: {shapes: [[1, -3]]}}": "3: inputs.'a/0'.shapes[0][1]: expected greater than or equal to 0",
    "inputs: {a: {range: [1, 0]}}": "3: inputs.a.range: expected [low, high], got [1.0, 0.0]",
    "inputs: {a: {range: [0, 1], values: [1]}}": "3: inputs.a: expected range or values, got both",
    "samples: /data/*.npz": "3: samples: expected files of one folder, relative to the spec",
    "samples: '*.pkl'": "3: samples: expected a glob that ends in .npz, without **, got '*.pkl'",
    "# OPEN QUESTION: which?": "3: answer this question, then delete the line: which?",
    "name: twice": "3: duplicate key 'name'; it is already in line 1",
}


@pytest.mark.parametrize(("text", "problem"), WRONG.items())
def test_a_wrong_value_is_told_with_line_place_expected_and_got(tmp_path, text, problem):
    (line,) = problems_of(tmp_path, f"{GOOD}{text}\n")
    assert line.startswith(f"x.yaml:{problem}")


@pytest.mark.attack
@pytest.mark.parametrize(
    "glob",
    [
        *("**/**/**/**/**/x.npz", "**/a/**/x.npz", "*/../*/../x.npz", "a/[ab]/../x.npz"),
        *("*/" * 32 + "x.npz", "**.npz", "a/?/x.npz"),
    ],
)
def test_a_glob_that_would_walk_many_folders_is_refused(tmp_path, glob):
    problems = problems_of(tmp_path, f"{GOOD}samples: '{glob}'\n")
    assert any("samples: expected " in line for line in problems)


@pytest.mark.parametrize("glob", ["../x.npz", "../../samples/[ab]?.npz", "a/../*.npz"])
def test_a_glob_may_begin_above_the_spec(tmp_path, glob):
    assert read_spec(write(tmp_path, "x.yaml", f"{GOOD}samples: '{glob}'\n")).samples == glob


@pytest.mark.attack
@pytest.mark.parametrize("name", ["a/b", "..", "a..b", ".hidden", "", "a b", "-x", "x" * 129, "é", "a\\nb"])
def test_a_name_that_is_no_safe_folder_name_is_refused(tmp_path, name):
    (line,) = problems_of(tmp_path, f'name: "{name}"\nsource: {{path: x}}\n')
    assert line.startswith("x.yaml:1: name: expected up to 128 letters, digits")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{}", "source: expected either path or url, got none"),
        ("{path: a, url: 'hf://o/r/x'}", "source: expected either path or url, got both"),
        ("model.onnx", "source: expected a mapping, got 'model.onnx'"),
        ("{path: ''}", "source.path: expected at least 1 character"),
        ("{url: model.onnx}", "source.url: expected hf://ORG/REPO@REVISION/PATH.onnx; download"),
        ("{url: 'http://h/a.onnx'}", "source.url: expected hf://ORG/REPO@REVISION/PATH.onnx; download"),
        ("{path: x, sha256: abc}", "source.sha256: expected 64 hexadecimal digits"),
        ("{path: x, sha256: 12}", "source.sha256: expected a valid string, got 12"),
    ],
)
def test_a_wrong_source_is_told(tmp_path, source, problem):
    lines = problems_of(tmp_path, f"name: x\nsource: {source}\n")
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"x.yaml:2: {problem}")


@pytest.mark.attack
@pytest.mark.parametrize(
    "text",
    [
        "name: x\nsource: {url: 'https://user:hunter2@host/x.onnx'}\n",
        "name: x\nsource: {url: 'https://hunter2@host/x.onnx'}\n",
        "name: x\nsource: 'https://user:hunter2@host/x.onnx'\n",
        "name: 'https://user:hunter2@host/x.onnx'\nsource: {path: x}\n",
        "name: x\nsource: {path: x}\nverify: {seed: 'https://host/x?token=hunter2'}\n",
        "name: x\nsource: {url: 'zip://a::https://user:hunter2@host/x.zip'}\n",
    ],
)
def test_credentials_in_a_url_are_refused_or_at_least_never_repeated(tmp_path, text):
    assert "hunter2" not in "\n".join(problems_of(tmp_path, text))


def test_all_problems_of_a_file_are_told_at_once(tmp_path):
    text = "name: a/b\nsorce: {path: x}\nverify: {seed: a, rtol: b}\nmeasure:\n  rounds: 1\n"
    lines = problems_of(tmp_path, text)
    assert [line.split(": ")[:2] for line in lines] == [
        ["x.yaml:1", "name"],
        ["x.yaml:1", "source"],
        ["x.yaml:2", "sorce"],
        ["x.yaml:3", "verify.rtol"],
        ["x.yaml:3", "verify.seed"],
        ["x.yaml:5", "measure.rounds"],
    ]


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_spec(tmp_path / "absent.yaml")
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(SpecError) as caught:
        read_specs(tmp_path)
    assert caught.value.message.count("cannot be read: not a regular file") == 2


def test_two_specs_of_one_name_are_refused(tmp_path):
    write(tmp_path, "a.yaml", GOOD)
    write(tmp_path, "b.yaml", f"# twin\n{GOOD}")
    with pytest.raises(SpecError) as caught:
        read_specs(tmp_path)
    assert told(caught.value, tmp_path) == [
        "b.yaml:2: name: 'good' is already the name of a.yaml; expected another"
    ]


def test_a_model_gets_what_it_leaves_out_from_the_defaults_and_keeps_its_own(tmp_path):
    write(tmp_path, "defaults.yaml", "targets: [cpu]\nverify: {rtol: 0.5, atol: 0.25}\n")
    write(tmp_path, "x.yaml", f"{GOOD}verify: {{atol: 0.125}}\n")
    (spec,) = read_specs(tmp_path)
    assert (spec.targets, spec.verify.rtol, spec.verify.atol) == (("cpu",), 0.5, 0.125)


def test_a_mistake_in_the_defaults_is_told_once_and_of_their_file(tmp_path):
    write(tmp_path, "defaults.yaml", "# ours\nname: x\nverify:\n  seed: a\n")
    write(tmp_path, "a.yaml", GOOD)
    write(tmp_path, "b.yaml", f"{GOOD.replace('good', 'b')}verify: {{rtl: 1}}\n")
    with pytest.raises(SpecError) as caught:
        read_specs(tmp_path)
    assert told(caught.value, tmp_path) == [
        "b.yaml:3: verify.rtl: unknown key; did you mean 'rtol'?",
        "defaults.yaml:2: name: belongs in each model's own file",
        "defaults.yaml:4: verify.seed: expected a valid integer, got 'a'",
    ]


def test_named_models_are_read_whatever_is_wrong_with_others(tmp_path):
    write(tmp_path, "a.yaml", GOOD)
    write(tmp_path, "b.yaml", "name: b\nbad: 1\n")
    write(tmp_path, "c.yaml", "{")
    assert [spec.name for spec in read_specs(tmp_path, names=["good"])] == ["good"]
    for broken in ("b", "c"):
        with pytest.raises(SpecError, match=f"{broken}.yaml:"):
            read_specs(tmp_path, names=[broken])


def test_an_unknown_name_is_told_with_the_nearest_known_one(tmp_path):
    write(tmp_path, "a.yaml", GOOD)
    with pytest.raises(SpecError, match="unknown model: 'goood'") as caught:
        read_specs(tmp_path, names=["goood"])
    assert caught.value.hint == "ortprep prepare good"


# -- a spec in Python says what the same file says, with the same messages


INPUTS = {"x": {"shapes": [[1, 64]], "range": [0, 1]}}


@pytest.mark.parametrize(
    "sections",
    [
        {"inputs": INPUTS, "tune": {"max_trials": 0}},
        {"inputs": {"x": {"shapes": np.array([[1, 64]]), "range": (np.float32(0), np.int64(1))}}},
    ],
)
def test_sections_are_mappings_with_numbers_of_python_or_numpy(tmp_path, sections):
    sections = {"tune": {"max_trials": 0}, **sections}
    path = tmp_path / "net.yaml"
    said = {"name": "net", "source": {"path": "net.onnx"}, "inputs": INPUTS, "tune": {"max_trials": 0}}
    path.write_text(json.dumps(said))
    assert resolved_spec(make_spec("net.onnx", sections=sections)) == resolved_spec(read_spec(path))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("models/My net (2).onnx", "My-net-2"),
        ("ünï.onnx", "uni"),
        ("hf://org/bert-base@main/onnx/model.onnx", "bert-base"),
        ("hf://org/bert-base@v1/onnx/model_int8.onnx", "bert-base-model_int8"),
        ("...onnx", "model"),
    ],
)
def test_a_bundle_is_named_after_its_source(source, name):
    assert make_spec(source, sections={"inputs": INPUTS}).name == name


def test_keys_are_merged_over_a_spec():
    spec = make_spec("net.onnx", sections={"inputs": INPUTS, "tune": {"max_trials": 5, "rounds": 9}})
    merged = override(spec, {"name": "other", "tune": {"max_trials": 0}})
    assert (merged.name, merged.tune.max_trials, merged.tune.rounds) == ("other", 0, 9)
    assert (merged.inputs, merged.folder) == (spec.inputs, spec.folder)
    with pytest.raises(SpecError, match="unknown key"):
        override(spec, {"tunes": {}})


@pytest.mark.attack
def test_a_folder_of_many_values_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_VALUES_OF_ALL", 50)
    for number in range(20):
        (tmp_path / f"s{number}.yaml").write_text(f"name: s{number}\nsource: {{path: m.onnx}}\n")
    with pytest.raises(SpecError, match="too many specs"):
        read_specs(tmp_path)
