from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.report.library import bundle_library
from tests.report.browsing import Page, browser


@pytest.fixture(scope="session")
def library() -> str:
    """The script that draws charts."""
    return str(bundle_library({})["script"])


@pytest.fixture(scope="session")
def chromium() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the reports that are opened."""
    return tmp_path_factory.mktemp("reports")
