"""A model larger than most machines want to hold twice: 2.5 GiB of weights in external data."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.big_model import prepare_big_model


@pytest.mark.manual
def test_a_model_of_2_5_gib_is_prepared_and_loaded_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    figures = prepare_big_model(tmp_path, size_bytes=int(2.5 * 2**30))
    assert figures["weights_gib"] == 2.5
    assert figures["parent_peak_mib"] < 300
    assert figures["children_peak_over_model"] < 2.2
    assert figures["load_peak_over_model"] < 2.2
