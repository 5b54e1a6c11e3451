"""A function runs once a module is imported, and the program notices nothing else."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import venv
from types import ModuleType

import pytest

from ortprep.runtime.dropin.import_hook import STARTUP_VARIABLE, call_after_import, startup_environment
from tests.runtime.dropin.builders import REPOSITORY

pytestmark = pytest.mark.runtime


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder where modules are found; what is imported and registered is forgotten afterwards."""
    modules, finders = set(sys.modules), list(sys.meta_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def test_functions_run_after_the_modules_own_code_in_the_order_of_their_registration(folder):
    (folder / "late_module.py").write_text("answer = 42\n")
    seen: list[object] = []
    call_after_import("late_module", lambda module: seen.append(("first", module.answer)))
    call_after_import("late_module", lambda module: seen.append(("second", module.answer)))
    assert seen == []
    module = importlib.import_module("late_module")
    assert seen == [("first", 42), ("second", 42)]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_a_function_for_a_module_that_is_imported_runs_at_once():
    seen: list[ModuleType] = []
    call_after_import("os", seen.append)
    assert seen == [os]


def test_a_package_and_its_submodules_are_imported_as_ever(folder):
    (folder / "late_package").mkdir()
    (folder / "late_package/__init__.py").write_text("from late_package.inner import answer\n")
    (folder / "late_package/inner.py").write_text("answer = 42\n")
    seen: list[str] = []
    call_after_import("late_package", lambda module: seen.append(module.__name__))
    assert importlib.import_module("late_package.inner").answer == 42
    assert seen == ["late_package"]


def test_a_finder_without_find_spec_is_passed_over(folder):
    (folder / "late_module.py").write_text("answer = 42\n")
    sys.meta_path.insert(0, object())  # type: ignore[arg-type]
    seen: list[int] = []
    call_after_import("late_module", lambda module: seen.append(module.answer))
    importlib.import_module("late_module")
    assert seen == [42]


def test_an_import_that_fails_may_be_tried_again(folder):
    (folder / "failing.py").write_text("import os\nif 'WORKS' not in os.environ: raise OSError('not yet')\n")
    seen: list[ModuleType] = []
    call_after_import("failing", seen.append)
    with pytest.raises(OSError, match="not yet"):
        importlib.import_module("failing")
    assert seen == []
    os.environ["WORKS"] = "1"
    try:
        module = importlib.import_module("failing")
        assert seen == [module]
    finally:
        del os.environ["WORKS"]


def test_a_module_that_there_is_not_stays_missing(folder):
    call_after_import("no_such_module", print)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module")


FAKE = "import sys; sys.stdout.write('onnxruntime\\n')\n"
CALLBACK = "def mark(module):\n    import sys; sys.stdout.write(f'callback {module.__name__}\\n')\n"


@pytest.fixture
def program(tmp_path):
    """An environment with a small module `onnxruntime`, and a function that runs after it."""
    (tmp_path / "onnxruntime.py").write_text(FAKE)
    (tmp_path / "callback.py").write_text(CALLBACK)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    return startup_environment("callback:mark", {**os.environ, "PYTHONPATH": path})


def run(code: str, environment: dict[str, str], python: str = sys.executable) -> str:
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


def test_the_startup_folder_is_not_where_a_program_finds_modules(program):
    assert "dropin/startup" not in run("import sys; print(sys.path)", program)


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
