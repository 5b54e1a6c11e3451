"""What `rollback` goes to, and `gc` keeps, where recorded moves did not happen."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from ortprep.registry.backend import Kind
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.garbage_collection import RetentionPolicy, choose_kept
from ortprep.registry.promotion import promote, rollback
from ortprep.registry.publish import publish
from ortprep.registry.references import VersionRef
from ortprep.registry.versions import Move, find_earlier_versions
from tests.registry.builders import write_bundle

A, B, C, D = (f"sha256:{letter * 64}" for letter in "abcd")
NOTHING = RetentionPolicy(keep_latest=0, keep_days=0, grace_hours=0)


@pytest.fixture
def kind():
    return "directory"


def moves_of(*moves: tuple[str, str, str]) -> tuple[Move, ...]:
    """Moves by their actions, their versions and the versions before them."""
    return tuple(
        Move("production", version, number, action, "t", before)
        for number, (action, version, before) in enumerate(moves, 1)
    )


@pytest.mark.parametrize(
    ("moves", "current", "earlier"),
    [
        ((("promote", A, ""), ("promote", B, A), ("promote", C, B)), B, (A,)),
        ((("promote", A, ""), ("promote", B, A), ("promote", C, B), ("promote", D, B)), B, (A,)),
        ((("promote", A, ""), ("promote", B, A), ("promote", C, B), ("promote", D, B)), D, (A, B)),
        ((("promote", A, ""), ("promote", B, A), ("promote", C, B), ("rollback", A, B)), A, ()),
        ((("promote", A, ""), ("promote", B, A), ("promote", A, B), ("rollback", B, A)), A, (A, B)),
        ((("promote", A, ""), ("promote", A, "")), A, ()),
        ((("promote", A, ""), ("promote", B, A), ("promote", B, "")), B, (A,)),
        ((("promote", A, ""), ("promote", B, A), ("promote", C, B)), D, (A, B, C)),
    ],
)
def test_a_move_that_was_cut_off_is_no_version_to_go_back_to(moves, current, earlier):
    assert find_earlier_versions(moves_of(*moves), current, {A, B, C, D}) == earlier


class Dying:
    """A registry to which no alias can be written."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def put_ref(self, model: str, kind: Kind, name: str, data: bytes) -> None:
        if kind is Kind.ALIAS:
            raise KeyboardInterrupt
        self._backend.put_ref(model, kind, name, data)


def test_after_a_promotion_that_was_killed_the_right_version_is_kept_and_served(catalogue, tmp_path):
    first, second, third = (
        publish(write_bundle(tmp_path / str(i), spec=bytes([i])), catalogue, label=f"v{i}").version.digest
        for i in range(3)
    )
    promote(VersionRef("net", first), "production", catalogue)
    promote(VersionRef("net", second), "production", catalogue)
    dying: Any = Dying(catalogue.backend)
    with pytest.raises(KeyboardInterrupt):
        promote(VersionRef("net", third), "production", Catalogue(dying, catalogue.cache))
    state = catalogue.read_state("net")
    moves = catalogue.read_moves("net", state.versions.values())
    assert moves["production"][-1].version == third, "recorded"
    assert choose_kept(state, moves, NOTHING, now=datetime.now(UTC)) == {first, second}
    assert rollback("net", "production", catalogue).version.digest == first
