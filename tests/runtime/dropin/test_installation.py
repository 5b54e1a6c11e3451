"""ONNX Runtime's own class is replaced, and applications see no difference but the speed."""

import importlib
import os
import subprocess
import sys
import venv

import pytest

from ortprep.runtime.dropin.import_hook import STARTUP_VARIABLE, call_after_import, startup_environment
from tests.runtime.dropin.builders import REPOSITORY, run_python, write_bundle_of, write_source

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


def assert_runs(model, code):
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


# -- A function runs once a module is imported, and the program notices nothing else


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder where modules are found; what is imported and registered is forgotten afterwards."""
    modules, finders = set(sys.modules), list(sys.meta_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def test_functions_run_in_order_after_the_code_of_a_module_that_is_imported_as_ever(folder, monkeypatch):
    (folder / "late").mkdir()
    (folder / "late/__init__.py").write_text("from late.inner import answer, fail\nif fail: raise OSError\n")
    (folder / "late/inner.py").write_text("import os\nanswer, fail = 42, 'WORKS' not in os.environ\n")
    seen = []
    call_after_import("late", lambda module: seen.append(("first", module.answer)))
    call_after_import("late", lambda module: seen.append(("second", module.answer)))
    with pytest.raises(OSError):
        importlib.import_module("late")
    assert seen == []
    del sys.modules["late.inner"]
    monkeypatch.setenv("WORKS", "1")
    assert importlib.import_module("late.inner").answer == 42
    assert seen == [("first", 42), ("second", 42)]
    module = sys.modules["late"]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__


FAKE = "import sys; sys.stdout.write('onnxruntime\\n')\n"
CALLBACK = "def mark(module):\n    import sys; sys.stdout.write(f'callback {module.__name__}\\n')\n"


@pytest.fixture
def program(tmp_path):
    """An environment with a small module `onnxruntime`, and a function that runs after it."""
    (tmp_path / "onnxruntime.py").write_text(FAKE)
    (tmp_path / "callback.py").write_text(CALLBACK)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    return startup_environment("callback:mark", {**os.environ, "PYTHONPATH": path})


def run(code, environment, python=sys.executable):
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_program_and_its_children_run_the_function(program):
    assert run("import onnxruntime", program) == "onnxruntime\ncallback onnxruntime\n"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import onnxruntime'], check=True)"
    assert run(child, program) == "onnxruntime\ncallback onnxruntime\n"


def test_a_program_without_onnxruntime_gets_neither_it_nor_numpy(program):
    shown = "import sys; print(sorted({'numpy', 'onnxruntime', 'typing', 'logging'} & set(sys.modules)))"
    plain = {**program, STARTUP_VARIABLE: ""}
    assert run(shown, program) == run(shown, plain)
    assert "onnxruntime" not in run(shown, program)


def test_the_applications_own_sitecustomize_runs(program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.stdout.write('own\\n')\n")
    named = "import sitecustomize; print(sitecustomize.__file__)"
    assert run(named, program) == f"own\n{tmp_path}/sitecustomize.py\n"


def test_an_interpreter_of_another_environment_needs_no_package_of_this_one(program, tmp_path):
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    environment = startup_environment("callback:mark", {**program, "PYTHONPATH": str(tmp_path)})
    tried = "import onnxruntime\ntry:\n import pytest\nexcept ImportError:\n print('no pytest')"
    python = str(tmp_path / "other/bin/python")
    assert run(tried, environment, python) == "onnxruntime\ncallback onnxruntime\nno pytest\n"


def test_an_environment_is_entered_once_however_often_it_is_made():
    once = startup_environment("a:b", {"PYTHONPATH": "/x::/y"})
    assert startup_environment("a:b", once) == once
    assert once["PYTHONPATH"].endswith(":/x::/y")
    alone = startup_environment("a:b", {})
    assert os.pathsep not in alone["PYTHONPATH"]  # an empty item would be the working folder
