import weakref

import pytest

from ortprep.runtime.loading import opened_bundle, session


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Digests and answers are remembered for one test only."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def sessions(monkeypatch):
    """Every native session that a load makes, in order, as long as somebody keeps it."""
    made = []
    build = session.build_session

    def build_noted(*args, **kwargs):
        one = build(*args, **kwargs)
        made.append(weakref.ref(one._sess))
        return one

    monkeypatch.setattr(opened_bundle, "build_session", build_noted)
    return made
