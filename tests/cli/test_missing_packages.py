"""Commands without the packages that they need."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

from ortprep.errors import MissingExtraError
from ortprep.init import init_spec
from ortprep.versions import hint_to_install
from tests.builders import conv_net, write_model
from tests.prepare.builders import REPOSITORY, Project

# -- commands whose dependencies are not installed

CONFIGS = str(REPOSITORY / "configs")
WITHOUT = """\
import sys
sys.modules[{module!r}] = None  # importing it fails as where it is not installed
sys.argv = ["ortprep", *{arguments!r}]
from ortprep.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("yaml", ["prepare"], "build"),
        ("fsspec", ["list", "--registry", "/nowhere"], "registry"),
        ("ray", ["prepare", "--engine", "ray", "--store", "store", "--configs", CONFIGS], "build,ray"),
    ],
)
def test_a_command_without_its_dependency_names_the_extra(tmp_path, module, arguments, extra):
    ended = Project(tmp_path).python("-c", WITHOUT.format(module=module, arguments=arguments))
    assert ended.code == 1
    assert ended.err.startswith("error: ")
    assert f"pip install -e '{REPOSITORY}[{extra}]'" in ended.err


def test_the_doctor_needs_none_of_the_build_s(tmp_path):
    ended = Project(tmp_path).python("-c", WITHOUT.format(module="filelock", arguments=["doctor", "env"]))
    assert ended.code in (0, 1)
    assert ended.out.startswith("ONNX Runtime")


# -- what to install where ONNX Runtime, or what a command needs, is missing: never a second wheel of it

CPU, GPU = "onnxruntime", "onnxruntime-gpu"
BARE = """\
import sys
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
"""
COMMAND = BARE + "from ortprep.__main__ import main; main()"
IMPORT = BARE + "from ortprep.runtime.loading.session import import_onnxruntime; import_onnxruntime()"
CUDA = (
    BARE + "from ortprep.versions import hint_to_install\n"
    "print('hint:', hint_to_install('cuda'), file=sys.stderr)"
)

HINTS = {
    ("a command", ()): "pip install -e 'ROOT[build,gpu]'",
    ("a command", (CPU,)): "pip install -e 'ROOT[build]'",
    ("a command", (GPU,)): "pip install -e 'ROOT[build]'",
    ("the import", ()): "pip install -e 'ROOT[gpu]'",
    ("the import", (CPU,)): f"pip install --force-reinstall --no-deps {CPU}==VERSION",
    ("the import", (GPU,)): f"pip install --force-reinstall --no-deps {GPU}==VERSION",
    ("the import", (GPU, CPU)): f"pip uninstall -y {GPU} {CPU} && pip install -e 'ROOT[gpu]'",
    ("CUDA", ()): "pip install -e 'ROOT[cuda]'",
    ("CUDA", (CPU,)): f"pip uninstall -y {CPU} && pip install -e 'ROOT[cuda]'",
    ("CUDA", (GPU,)): "pip install -e 'ROOT[cuda]'",
}
SCRIPTS = {"a command": COMMAND, "the import": IMPORT, "CUDA": CUDA}


@pytest.fixture
def installed():
    """The distribution of ONNX Runtime that this environment has."""
    return next(one for name in (GPU, CPU) for one in metadata.distributions(name=name))


@pytest.mark.parametrize(("case", "hint"), HINTS.items(), ids=str)
def test_the_hint_fits_the_wheel_that_is_installed(tmp_path, installed, case, hint):
    needed_by, wheels = case
    real, version = installed.read_text("METADATA") or "", installed.version
    for wheel in wheels:
        folder = tmp_path / f"{wheel.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(real.replace(f"Name: {installed.name}", f"Name: {wheel}", 1))
    ended = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPTS[needed_by]],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'pipeline'}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (
        ended.stderr.splitlines()[-1]
        == f"hint: {hint.replace('VERSION', version).replace('ROOT', str(REPOSITORY))}"
    )


def test_init_says_so_before_a_child_dies_of_it(tmp_path, monkeypatch):
    write_model(conv_net(), tmp_path / "net.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"^cannot import onnxruntime") as caught:
        init_spec(tmp_path / "net.onnx", folder=tmp_path / "configs")
    assert caught.value.hint == hint_to_install()
