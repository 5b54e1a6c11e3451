"""The commands that install ortprep: from a checkout, a wheel, a repository or an index."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ortprep.versions import install_command, upgrade_command

ROOT = Path(__file__).resolve().parents[1]
PRINT = "from ortprep.versions import *; print(install_command('build', 'gpu')); print(upgrade_command())"
WHEEL = {"url": "file:///srv/my wheels/ortprep-0.1.0-py3-none-any.whl", "archive_info": {}}
GIT = {"url": "https://example.org/ortprep.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}}


def test_a_checkout_is_installed_again_in_place() -> None:
    assert install_command("ray") == f"pip install -e '{ROOT}[ray]'"
    assert install_command() == f"pip install -e {ROOT}"
    assert upgrade_command() == f"git -C {ROOT} pull"


@pytest.mark.parametrize(
    ("record", "install", "upgrade"),
    [
        (WHEEL, f"'ortprep[build,gpu] @ {WHEEL['url']}'", "ortprep-NEWER.whl"),
        (GIT, f"'ortprep[build,gpu] @ git+{GIT['url']}@{'0' * 40}'", "ortprep-NEWER.whl"),
        (None, "'ortprep[build,gpu]'", "--upgrade ortprep"),
    ],
    ids=["a wheel", "a repository", "an index"],
)
def test_what_pip_installed_is_installed_from_where_it_came(
    tmp_path: Path, record: dict[str, Any] | None, install: str, upgrade: str
) -> None:
    (tmp_path / "ortprep").mkdir()
    for name in ("__init__.py", "quoting.py", "versions.py"):
        shutil.copy(ROOT / "pipeline" / "ortprep" / name, tmp_path / "ortprep" / name)
    metadata = tmp_path / "ortprep-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ortprep\nVersion: 0.1.0\n")
    if record is not None:
        (metadata / "direct_url.json").write_text(json.dumps(record))
    done = subprocess.run(
        [sys.executable, "-S", "-c", PRINT],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"pip install {install}", f"pip install {upgrade}"]
