"""The user's own metric: it sees what was answered, and whatever is wrong with it is told by its name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortprep.children.answers import Answer
from ortprep.errors import SpecError
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.runtime.tensors.element_types import ELEMENT_TYPES, Array, narrow
from ortprep.stages.core.accuracy import metric_digest, run_user_metric

LARGE = np.arange(300_000, dtype=np.float64)


@pytest.fixture
def folder(tmp_path):
    """A spec's folder whose name needs no luck: `spec's ü`."""
    folder = tmp_path / "spec's ü"
    folder.mkdir()
    return folder


def run(folder: Path, metric: str, source: str = "", *, timeout_s: float = 600.0) -> float:
    """Runs a metric on two samples: `x`, and `y` and `z` that were expected and got."""
    if source:
        (folder / "metrics.py").write_text(source)
    samples = []
    for position in range(2):
        samples.append(folder.parent / f"{position}.npz")
        write_tensors(samples[-1], {"x": np.full(2, position)})
    half = narrow(np.array([1.0, 2.5]), ELEMENT_TYPES["bfloat16"])
    expected = [write(folder.parent, f"expected{i}", y=LARGE + i, z=half) for i in range(2)]
    got = [write(folder.parent, f"got{i}", y=LARGE + 2 * i, z=half) for i in range(2)]
    request = (metric, folder, tuple(samples), tuple(expected), tuple(got))
    return run_user_metric(request, timeout_s=timeout_s)


def write(folder: Path, side: str, **outputs: Array) -> tuple[Answer, ...]:
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
        ("metrics:score", "x = 1", ["failed", "module 'metrics' has no attribute 'score'"]),
        ("metrics:score", "def score(:", ["failed", "SyntaxError", 'metrics.py", line 1']),
        ("metrics:score", "raise SystemExit('enough')", ["failed", "SystemExit: enough"]),
        (
            "metrics:score",
            "def score(*_):\n    return inner()\ndef inner():\n    raise KeyError('logits')",
            ["failed", "KeyError: 'logits'", "line 4, in inner", "raise KeyError('logits')"],
        ),
        ("metrics:score", "import os\ndef score(*_): os._exit(3)", ["gave no answer", "exit code 3"]),
        ("metrics:score", "def score(*_): return float('nan')", ["no finite number", "got float nan"]),
        ("metrics:score", "def score(*_): return True", ["no finite number", "got bool True"]),
        ("metrics:score", "def score(*_): pass", ["no finite number", "got NoneType None"]),
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
