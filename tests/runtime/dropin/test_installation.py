"""ONNX Runtime's own class is replaced, and applications see no difference but the speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.dropin.builders import run_python, write_bundle_of, write_source

pytestmark = pytest.mark.runtime

CHECK = """
import sys, numpy
def of_bundle(session):
    from tests.runtime.dropin.builders import is_of_bundle
    return is_of_bundle(session)
model = sys.argv[1]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    model = write_source(folder / "net.onnx")
    write_bundle_of(model, folder / "bundles/net")
    return model


def assert_runs(model: Path, code: str) -> None:
    done = run_python(CHECK + code, model, ORTPREP_BUNDLES=str(model.parent / "bundles"))
    assert done.returncode == 0, done.stderr


def test_before_the_application_imports_onnxruntime(model):
    assert_runs(
        model,
        """
from ortprep.runtime import install
install()
install()
assert "onnxruntime" not in sys.modules
from onnxruntime import InferenceSession
import onnxruntime, onnxruntime.capi.onnxruntime_inference_collection as collection
assert InferenceSession is onnxruntime.InferenceSession is collection.InferenceSession
session = InferenceSession(model, providers=["CPUExecutionProvider"])
assert of_bundle(session)
assert type(session) is InferenceSession and isinstance(session, collection.Session)
assert InferenceSession.__name__ == "InferenceSession" and InferenceSession.__module__ == collection.__name__
assert session._model_path == model
assert [node.name for node in session.get_inputs()] == ["x"]
assert session.get_providers() == ["CPUExecutionProvider"]
""",
    )


def test_after_the_application_imported_it_its_sessions_stay_instances(model):
    assert_runs(
        model,
        """
import onnxruntime
before = onnxruntime.InferenceSession
earlier = before(model, providers=["CPUExecutionProvider"])
import ortprep.runtime
ortprep.runtime.install()
assert onnxruntime.InferenceSession is not before
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
assert of_bundle(session) and not of_bundle(earlier)
assert isinstance(session, before) and isinstance(earlier, onnxruntime.InferenceSession)
assert issubclass(before, onnxruntime.InferenceSession)
assert not isinstance(model, onnxruntime.InferenceSession)
""",
    )


def test_classes_of_the_application_inherit_from_it(model):
    assert_runs(
        model,
        """
import abc, ortprep.runtime
ortprep.runtime.install()
import onnxruntime

class Base(abc.ABC):
    @abc.abstractmethod
    def predict(self, x): ...

class Counting(onnxruntime.InferenceSession, Base):
    def __init__(self, path, **others):
        super().__init__(path, providers=["CPUExecutionProvider"], **others)
        self.runs = 0
    def run(self, *arguments):
        self.runs += 1
        return super().run(*arguments)
    def predict(self, x):
        return self.run(None, {"x": x})

session = Counting(model)
assert of_bundle(session) and session.runs == 1
assert isinstance(session, onnxruntime.InferenceSession) and isinstance(session, Base)
assert not isinstance(onnxruntime.InferenceSession(model), Counting)
""",
    )


def test_load_makes_its_own_sessions_whatever_is_installed(model):
    assert_runs(
        model,
        """
import ortprep.runtime
ortprep.runtime.install()
import logging
logging.basicConfig(level="INFO")
session = ortprep.runtime.load(f"{model.rpartition('/')[0]}/bundles/net")
import onnxruntime
assert of_bundle(session) and isinstance(session, onnxruntime.InferenceSession)
""",
    )


WRAPPER = """
import onnxruntime, ortprep.runtime
from onnxruntime.capi import onnxruntime_inference_collection as collection
bundle = f"{model.rpartition('/')[0]}/bundles/net"
options = onnxruntime.SessionOptions()
loaded = []
plain = onnxruntime.InferenceSession
class Wrapper(plain):
    def __init__(self, path, *arguments, **named):
        loaded.append(ortprep.runtime.load(bundle, session_options=options))
        super().__init__(path, *arguments, **named)
onnxruntime.InferenceSession = Wrapper
"""


@pytest.mark.attack
@pytest.mark.parametrize(
    ("before", "call"),
    [
        ("", "ortprep.runtime.load(bundle)"),
        ("collection.InferenceSession = Wrapper", "ortprep.runtime.load(bundle, session_options=options)"),
        ("", "ortprep.session(model, options)"),
        ("ortprep.runtime.install()", "onnxruntime.InferenceSession(model, options)"),
    ],
)
def test_an_application_whose_sessions_load_bundles_never_waits_for_itself(model, before, call):
    assert_runs(
        model,
        WRAPPER
        + f"""
{before}
session = {call}
assert of_bundle(session) and all(map(of_bundle, loaded))
assert type(session) is plain or len(loaded) == 1
""",
    )


def test_a_class_that_the_application_put_in_place_before_stays_in_use(model):
    assert_runs(
        model,
        """
import onnxruntime
class Counting(onnxruntime.InferenceSession):
    made = 0
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        Counting.made += 1
onnxruntime.InferenceSession = Counting
from ortprep.runtime import install
install()
assert of_bundle(onnxruntime.InferenceSession(model)) and Counting.made == 1
""",
    )


def test_a_module_that_only_has_onnxruntimes_name_is_left_alone(model):
    assert_runs(
        model,
        """
import types
from ortprep.runtime import install
stub = sys.modules["onnxruntime"] = types.ModuleType("onnxruntime")
stub.InferenceSession = object
install()
assert stub.InferenceSession is object
""",
    )
