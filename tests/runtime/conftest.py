from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Digests and answers are remembered for one test only."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(folder))
    return folder
