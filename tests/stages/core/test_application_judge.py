"""Laws of the application as the judge: what counts as an answer, and what is refused, and why."""

import fcntl
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.verification import describe_files
from ortprep.children.answers import Answer
from ortprep.errors import SpecError, StageError
from ortprep.measuring.staged_bundles import STAGED_VARIANT, StagedBundles
from ortprep.runtime.loading.session import CPU, default_plan
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.runtime.tensors.element_types import to_bfloat16
from ortprep.spec.validation import parse_spec
from ortprep.stages.core.accuracy import FunctionCall, call_user_function, metric_digest
from ortprep.stages.core.application_judge import ApplicationJudge, describe_program
from tests.builders import matmul_net, write_model
from tests.prepare.test_disk import small_disk

START = """
import os, random, sys, time
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"])
with_bundle = bool(os.environ.get("ORTPREP_BUNDLES"))
"""


@pytest.fixture
def said():
    """Returns what judges say."""
    return []


@pytest.fixture
def make_judge(tmp_path, said):
    """Returns a function that makes the judge of an application, given its last lines."""

    def make(program, **options):
        (tmp_path / "app.py").write_text(START + program)
        judge = {"run": [sys.executable, "app.py"], "timeout_s": 60, **options}
        convert = {"precision": "auto", "judge": judge}
        spec = parse_spec({"name": "net", "source": {"path": "net.onnx"}, "convert": convert})
        return ApplicationJudge(spec.located_in(tmp_path), spec.convert.judge, said.append)

    write_model(matmul_net(), tmp_path / "net.onnx")
    return make


@pytest.fixture
def bundle(make_judge, tmp_path):
    """Returns a bundle of the application's model."""
    source = tuple(one for one in describe_files(tmp_path) if one.path == "net.onnx")
    tensors = [(TensorSpec(name, "float32", ("batch", 64)),) for name in ("x", "y")]
    staged = StagedBundles(tmp_path / "staged", *tensors)
    return staged.stage_judged(default_plan(str(tmp_path / "net.onnx"), CPU), source)


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ("sys.exit(3)", {}, "ended with exit code 3"),
        ("os.abort()", {}, "was ended by signal 6"),
        ("import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()", {}, "a traceback"),
        ("pass", {}, "wrote nothing to stdout"),
        ("pass", {"compare": "answers.txt"}, "did not write answers.txt"),
        ("print(random.random())", {}, "not stable from run to run"),
        ("print(1)", {"run": ["no-such-program"]}, "cannot be run: no-such-program"),
        ("print(1)", {"compare": "own.py:agree"}, "No module named 'own'"),
    ],
)
def test_what_gives_no_answer_by_itself_is_an_error_that_says_why(make_judge, program, options, message):
    with pytest.raises(SpecError, match=r"convert\.judge") as caught:
        make_judge(program, **options)
    assert message in str(caught.value)


def test_a_program_that_takes_too_long_leaves_no_process(make_judge, tmp_path):
    started = "import subprocess\nopen('pid', 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
    with pytest.raises(SpecError, match="took longer than 2 s"):
        make_judge(f"{started}time.sleep(600)", timeout_s=2)
    process = Path("/proc", (tmp_path / "pid").read_text(), "cmdline")
    for _ in range(100):
        if not process.exists() or not process.read_bytes():
            return
        time.sleep(0.05)
    pytest.fail("a process that the program has started is still there")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('page')\nif with_bundle: sys.exit(4)", "with the converted model it ended with exit code 4"),
        ("print('page', flush=True)\nif with_bundle: os.abort()", "it was ended by signal 6"),
    ],
)
def test_what_fails_with_the_candidate_only_refuses_the_candidate(make_judge, bundle, program, reason):
    verdict = make_judge(program).judge(bundle, STAGED_VARIANT)
    assert not verdict.holds
    assert reason in verdict.reason


def test_a_candidate_that_the_application_did_not_load_is_not_judged(make_judge, bundle, tmp_path, said):
    judge = make_judge("print('page')\nprint('ortprep: page 7', file=sys.stderr)")
    write_model(matmul_net(seed=1), tmp_path / "net.onnx")
    with pytest.raises(StageError, match="did not use the converted model") as caught:
        judge.judge(bundle, STAGED_VARIANT)
    assert "no bundle was prepared from these bytes" in said[-1]
    assert "page 7" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "described"),
    [
        (["/usr/bin/python3.11", "/home/me/app", "token"], "python3.11 app"),
        (["python", "-m", "app"], "python"),
        (["uv", "app.py", "token"], "uv app.py"),
        (["/opt/read-pages", "token"], "read-pages"),
    ],
)
def test_a_description_of_a_program_has_no_other_arguments(command, described):
    assert describe_program(command) == described


def test_runs_in_one_folder_take_turns(make_judge):
    alone = "os.close(os.open('busy', os.O_CREAT | os.O_EXCL)); time.sleep(0.3); os.remove('busy')"
    program = f"{alone}\nopen('answers.txt', 'w').write('same')"
    with ThreadPoolExecutor(2) as threads:
        judges = [threads.submit(make_judge, program, compare="answers.txt") for _ in range(2)]
        assert all(judge.result() for judge in judges), "each refuses a program that fails"


@pytest.mark.attack
def test_a_lock_on_the_folder_that_any_reader_can_take_keeps_no_judge_waiting(make_judge, tmp_path, said):
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as threads:
            judge = threads.submit(make_judge, "print('page')")
            try:
                assert judge.result(60)
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)
    assert not any("waiting" in line for line in said)


def test_the_agreement_of_lines_is_the_share_of_equal_ones_and_a_missing_one_differs(make_judge, bundle):
    program = "print('a\\nb\\nc\\n' + ('x' if with_bundle else 'd'))"
    strict = make_judge(program).judge(bundle, STAGED_VARIANT)
    assert (strict.agreement, strict.equal, strict.lines, strict.holds) == (0.75, 3, 4, False)
    assert "3 of 4 lines of stdout the same" in str(strict)
    assert make_judge(program, min_agreement=0.75).judge(bundle, STAGED_VARIANT).holds
    shorter = make_judge("print('a' if with_bundle else 'a\\nb')").judge(bundle, STAGED_VARIANT)
    assert shorter.agreement == 0.5


def test_a_file_may_be_the_answer(make_judge, bundle):
    program = "print(random.random())\nopen('answers.txt', 'w').write('same')"
    verdict = make_judge(program, compare="answers.txt").judge(bundle, STAGED_VARIANT)
    assert verdict.holds
    assert verdict.compared == "answers.txt"


def test_an_own_function_says_how_far_answers_agree(make_judge, bundle, tmp_path):
    (tmp_path / "own.py").write_text(
        "def agree(plain, candidate):\n    return float(plain.split()[0] == candidate.split()[0])\n"
    )
    program = "print('total', random.random())"
    assert make_judge(program, compare="own.py:agree").judge(bundle, STAGED_VARIANT).holds


def test_the_runs_without_bundles_do_not_see_those_of_the_build(make_judge, bundle, monkeypatch):
    monkeypatch.setenv("ORTPREP_BUNDLES", str(bundle))
    monkeypatch.setenv("ORTPREP_PRECISION", "fp32")
    judge = make_judge("print(with_bundle, os.environ.get('ORTPREP_PRECISION'))", min_agreement=0)
    assert judge.judge(bundle, STAGED_VARIANT).equal == 0


def test_a_program_that_changes_what_its_arguments_name_is_told(make_judge, said):
    program = "open('log.txt', 'a').write('run'); print('page')"
    make_judge(program)
    assert not any("each build judges again" in line for line in said)
    make_judge(program, run=[sys.executable, "app.py", "log.txt"])
    assert "each build judges again" in said[-1]


def test_a_full_disk_refuses_no_candidate(make_judge, bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    ignoring = "try: print('x' * 2_000_000, flush=True)\n    except OSError: os._exit(0)"
    with small_disk(tmp_path / "tmp", size_kb=1024):
        judge = make_judge(f"print('page', flush=True)\nif with_bundle:\n    {ignoring}")
        with pytest.raises(OSError, match="No space left on device"):
            judge.judge(bundle, STAGED_VARIANT)


# -- the user's own metric: it sees what was answered, and whatever is wrong with it is told by its name

LARGE = np.arange(300_000, dtype=np.float64)


@pytest.fixture
def folder(tmp_path):
    """A spec's folder whose name needs no luck: `spec's ü`."""
    folder = tmp_path / "spec's ü"
    folder.mkdir()
    return folder


def run(folder, metric, source="", *, timeout_s=600.0):
    """Runs a metric on two samples: `x`, and `y` and `z` that were expected and got."""
    if source:
        (folder / "metrics.py").write_text(source)
    samples = []
    for position in range(2):
        samples.append(folder.parent / f"{position}.npz")
        write_tensors(samples[-1], {"x": np.full(2, position)})
    half = to_bfloat16(np.array([1.0, 2.5]))
    expected = [write(folder.parent, f"expected{i}", y=LARGE + i, z=half) for i in range(2)]
    got = [write(folder.parent, f"got{i}", y=LARGE + 2 * i, z=half) for i in range(2)]
    answers = (tuple(expected), tuple(got))
    call = FunctionCall(metric, folder, "convert.gate.metric", (), tuple(samples), answers)
    return call_user_function(call, timeout_s=timeout_s)


def write(folder, side, **outputs):
    answers = tuple(Answer(name, str(folder / f"{side}-{name}.npy")) for name in outputs)
    for answer in answers:
        np.save(answer.file, outputs[answer.output])
    return answers


METRIC = """
import numpy as np
from own import SCALE

def score(inputs, expected, got):
    print("noise on stdout")
    assert [sample["x"].tolist() for sample in inputs] == [[0, 0], [1, 1]]
    assert [list(sample) for sample in expected] == [["y", "z"]] * 2
    assert got[1]["z"].tolist() == [1.0, 2.5] and got[1]["z"].dtype == np.float64
    worst = max(np.abs(a["y"] - b["y"]).max() for a, b in zip(expected, got))
    got[0]["y"][:] = 0
    return np.float32(worst) * SCALE
"""


def test_a_metric_sees_all_samples_and_changes_no_file(folder):
    (folder / "own.py").write_text("SCALE = 3")
    assert run(folder, "metrics:score", METRIC) == 3
    assert np.array_equal(np.load(folder.parent / "got0-y.npy"), LARGE)
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.py", "own.py"]


def test_a_metric_may_be_in_a_package_and_be_any_callable(folder):
    (folder / "own").mkdir()
    (folder / "own" / "metrics.py").write_text(
        "class Score:\n    def __call__(self, *_): return 7\nscore = Score()"
    )
    assert run(folder, "own.metrics:score") == 7


@pytest.mark.parametrize(
    ("metric", "source", "told"),
    [
        ("missing:score", "", ["failed", "No module named 'missing'"]),
        ("metrics:score", "raise SystemExit('enough')", ["failed", "SystemExit: enough"]),
        (
            "metrics:score",
            "def score(*_):\n    return inner()\ndef inner():\n    raise KeyError('logits')",
            ["failed", "KeyError: 'logits'", "line 4, in inner", "raise KeyError('logits')"],
        ),
        ("metrics:score", "import os\ndef score(*_): os._exit(3)", ["gave no answer", "exit code 3"]),
        ("metrics:score", "def score(*_): return float('nan')", ["no finite number", "got float nan"]),
        ("metrics:score", "def score(*_): return True", ["no finite number", "got bool True"]),
    ],
)
def test_what_is_wrong_with_a_metric_is_told_by_its_name(folder, metric, source, told):
    with pytest.raises(SpecError) as caught:
        run(folder, metric, source)
    assert caught.value.message.startswith("convert.gate.metric ")
    assert all(part in caught.value.message for part in (metric, *told)), caught.value.message
    assert caught.value.hint


def test_a_metric_that_takes_too_long_is_stopped(folder):
    source = "import time\ndef score(*_): time.sleep(3600)"
    with pytest.raises(SpecError, match=r"convert\.gate\.metric gave no answer: metrics:score"):
        run(folder, "metrics:score", source, timeout_s=0.5)


def test_an_edited_metric_has_another_digest_and_one_from_elsewhere_has_none(folder):
    (folder / "own").mkdir()
    files = [folder / "metrics.py", folder / "own" / "__init__.py", folder / "own" / "metrics.py"]
    for file, module in zip(files, ("metrics", "own", "own.metrics"), strict=True):
        assert metric_digest(f"{module}:score", folder) == ""
        file.write_text("a = 1")
        before = metric_digest(f"{module}:score", folder)
        file.write_text("a = 2")
        assert before != metric_digest(f"{module}:score", folder) != ""
