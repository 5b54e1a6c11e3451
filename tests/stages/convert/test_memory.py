"""What a pass says of the memory it takes, before it starts."""

from __future__ import annotations

import pytest

from ortprep.errors import ResourceError
from ortprep.stages.convert import passes as memory

GIB = 2**30


@pytest.mark.parametrize("streaming", ["fp16", "bf16", "shapes", "int4-weights"])
def test_a_pass_that_streams_its_weights_needs_no_room_for_them(streaming: str) -> None:
    assert memory.require_memory(streaming, 10**6 * GIB, external=True) is None


@pytest.mark.parametrize("holding", sorted(memory.FACTORS))
def test_one_that_holds_the_model_says_so_and_refuses_where_it_cannot(
    holding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 16 * GIB)
    assert memory.require_memory(holding, 10**6, external=True) is None
    said = memory.require_memory(holding, 4 * GIB, external=True)
    assert said is not None
    assert holding in said
    assert "16.0 GiB" in said
    with pytest.raises(ResourceError, match=r"not enough memory for .*\n  expected .* GiB, got 16\.0 GiB"):
        memory.require_memory(holding, 15 * GIB, external=True)
