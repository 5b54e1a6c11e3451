from __future__ import annotations

from pathlib import Path

import pytest

from tests.prepare.builders import Project, new_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project that was never built."""
    return new_project(tmp_path / "project")
