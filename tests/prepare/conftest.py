from __future__ import annotations

from pathlib import Path

import pytest

from tests.prepare.builders import Outcome, Project, new_project


@pytest.fixture(scope="session")
def first_build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Outcome]:
    """A project that was built once, by the command; not to be changed."""
    project = new_project(tmp_path_factory.mktemp("built") / "project")
    outcome = project.run("prepare")
    assert outcome.code == 0, outcome.err
    return project, outcome


@pytest.fixture
def built(first_build: tuple[Project, Outcome], tmp_path: Path) -> Project:
    """A built project of the test's own."""
    return first_build[0].copy_to(tmp_path / "project")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project that was never built."""
    return new_project(tmp_path / "project")
