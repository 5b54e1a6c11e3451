import pytest

from tests.prepare.builders import new_project


@pytest.fixture
def project(tmp_path):
    """A project that was never built."""
    return new_project(tmp_path / "project")
