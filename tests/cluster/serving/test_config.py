"""What a deployment is told is checked before anything is deployed."""

from __future__ import annotations

import pytest

from ortprep.cluster import ServeConfig
from ortprep.errors import PoolError


def test_a_replica_has_one_gpu_at_most() -> None:
    with pytest.raises(PoolError, match="expected one GPU or a part of one, got 2"):
        ServeConfig(gpus=2).check()
