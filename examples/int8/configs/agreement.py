"""The metric of the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Arrays = Sequence[Mapping[str, np.ndarray[Any, Any]]]
SURE = 0.5
"""Scores below this are shown to users as "unknown" anyway."""


def same_type(_inputs: Arrays, expected: Arrays, got: Arrays) -> float:
    """Returns the share of files that keep their type, of those that fp32 is sure of."""
    before = np.concatenate([sample["target_label"] for sample in expected])
    after = np.concatenate([sample["target_label"] for sample in got])
    sure = before.max(axis=1) >= SURE
    return float((before.argmax(axis=1) == after.argmax(axis=1))[sure].mean())
