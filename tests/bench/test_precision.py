"""The comparison of precisions keeps to its own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import precision
from ortprep.errors import StageError


@pytest.mark.parametrize("given", [True, False])
def test_the_environment_is_below_the_folder_and_a_temporary_one_is_removed(tmp_path, monkeypatch, given):
    folder = tmp_path / "work"
    folder.mkdir()

    def refuse(environment: Path, requirements: object) -> Path:
        assert environment.parent == folder
        raise StageError("cannot install RapidOCR")

    monkeypatch.setattr(precision, "make_environment", refuse)
    monkeypatch.setattr(precision, "mkdtemp", lambda **_options: str(folder))
    assert precision.main(["--folder", str(folder)] if given else []) == StageError.exit_code
    assert folder.exists() == given
