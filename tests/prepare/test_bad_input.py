"""Specs and sources that are wrong."""

import re

import numpy as np
import pytest

from tests import builders as models
from tests.builders import write_model
from tests.prepare.builders import SHAPES, is_intact, untouched

# -- specs that are wrong in themselves or of their model are told so early, and the old bundle stays

USUAL = "name: net\nsource: {path: ../models/net.onnx}\n"

# One case of each place that refuses: what each place refuses is in the tests of specs and of agreement.
WRONG = {
    "a misspelt key": (
        USUAL + "verifi: {rtol: 1}\n",
        r"net\.yaml:3: verifi: unknown key; did you mean 'verify'\?",
    ),
    "no YAML": (USUAL + "verify: {rtol: 1\n", r"net\.yaml"),
    "an option ONNX Runtime does not know": (
        USUAL + "runtime: {session_config: {session.use_env_allocator: 1}}\n",
        r"net\.yaml:3: runtime\.session_config\.'session\.use_env_allocator': .*session\.use_env_allocators",
    ),
}


@pytest.mark.parametrize(("text", "pattern"), WRONG.values(), ids=WRONG)
def test_a_wrong_spec_is_told_with_its_line_and_the_old_bundle_stays(built, text, pattern):
    (built.configs / "net.yaml").write_text(text)
    with untouched(built):
        outcome = built.call("prepare")
    assert outcome.out == ""
    assert re.search(pattern, outcome.err), outcome.err
    assert "Traceback" not in outcome.err
    assert (outcome.code, outcome.err.startswith(("error: ", "FAILED fetch:net\nerror: "))) in {
        (2, True),
        (1, True),
    }


def test_samples_and_a_spec_that_contradict_the_model_are_refused_before_long_work(built):
    np.savez(built.configs / "one.npz", x=np.zeros((1, 64), np.float64))
    built.write_spec(inputs=SHAPES, samples="*.npz")
    with untouched(built):
        outcome = built.call("prepare")
    assert (outcome.code, outcome.out) == (2, "")
    assert re.search(r"one\.npz.*float64", outcome.err), outcome.err
    built.write_spec(inputs={})
    with untouched(built):
        outcome = built.call("prepare")
    assert (outcome.code, outcome.out) == (2, "")
    assert "inputs.x.shapes: missing" in outcome.err
    assert " of net: spec does not fit its model: net, configs/net.yaml\n" in outcome.err
    hint = "correct the entries named above in configs/net.yaml, then ortprep prepare net"
    assert f"\nhint: {hint}\n" in outcome.err
    assert "done" not in outcome.err.replace("0 done", "")


# -- models that cannot be prepared: each is refused by name, and the old bundle stays


FORM = re.compile(
    r"error: (?P<what>.+)\n(?P<details>(  .+\n)*)(\nhint: .+\n)?(.+\n)*?[01] done, .*[12] failed.*\n"
)
"""What failed, what was expected and got, a hint; then doit's sum. Both variants may fail for one reason."""


def with_model(build):
    def change(project):
        write_model(build(), project.models / "net.onnx")
        project.write_spec(inputs={"x": {"shapes": [[2, 4]]}})

    return change


# One case of each place that refuses: what each place refuses is in its stage's tests.
BAD = {
    "missing": (lambda p: (p.models / "net.onnx").unlink(), r"source model missing.*no such file"),
    "an unknown operator": (with_model(models.unknown_operator), "Frobnicate"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "pattern"), BAD.values(), ids=BAD)
def test_a_bad_model_is_refused_by_name_and_the_old_bundle_stays(built, change, pattern):
    change(built)
    with untouched(built):
        outcome = built.call("prepare")
    assert (outcome.code, outcome.out) == (1, "")
    told = FORM.search(outcome.err)
    assert told, outcome.err
    assert "net" in told["what"]
    assert re.search(pattern, told["what"] + told["details"], re.DOTALL), outcome.err
    assert "Traceback" not in outcome.err
    assert is_intact(built.bundle())
