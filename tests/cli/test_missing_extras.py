"""Commands whose dependencies are not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prepare.builders import REPOSITORY, Project

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
def test_a_command_without_its_dependency_names_the_extra(
    tmp_path: Path, module: str, arguments: list[str], extra: str
) -> None:
    ended = Project(tmp_path).python("-c", WITHOUT.format(module=module, arguments=arguments))
    assert ended.code == 1
    assert ended.err.startswith("error: ")
    assert f"pip install -e '{REPOSITORY}[{extra}]'" in ended.err


def test_the_doctor_needs_none_of_the_build_s(tmp_path: Path) -> None:
    ended = Project(tmp_path).python("-c", WITHOUT.format(module="filelock", arguments=["doctor", "env"]))
    assert ended.code in (0, 1)
    assert ended.out.startswith("ONNX Runtime")
