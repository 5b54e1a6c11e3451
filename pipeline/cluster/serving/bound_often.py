"""Bound runs of a session that gets batches of one length for long, and then of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.runtime.binding import BoundRuns
from pipeline.runtime.loading.session import CUDA

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.runtime.element_types import Array

_OFTEN = 3
"""Batches of the same shapes one after the other, from which on it pays to bind to them."""


class BoundOften:
    """Bound runs, bound to the first shapes until others come several times one after the other.

    A session that records a CUDA graph stays with the first: it would replay the graph on their addresses.

    Args:
        session: The session.
    """

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session, self._runs = session, BoundRuns(session)
        self._shapes: tuple[tuple[int, ...], ...] | None = None
        self._last: tuple[tuple[int, ...], ...] | None = None
        self._in_a_row = 0
        cuda = session.get_provider_options().get(CUDA, {})
        self._is_recorded = cuda.get("enable_cuda_graph", "0").lower() in ("1", "true")

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """Shapes of the inputs that it is bound to; None before the first run."""
        return self._shapes

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs on a batch and returns its outputs by name, as arrays on the host.

        Args:
            feeds: Arrays by input name, always in the same order.

        Raises:
            Exception: Whatever ONNX Runtime raises.
        """
        shapes = tuple(array.shape for array in feeds.values())
        self._in_a_row = self._in_a_row + 1 if shapes == self._last else 1
        self._last = shapes
        if shapes == self._shapes or self._in_a_row < _OFTEN or self._is_recorded:
            answers = self._runs.run(feeds)
            self._shapes = self._shapes or shapes
            return answers
        runs = BoundRuns(self._session)
        answers = runs.run(feeds)
        self._runs, self._shapes = runs, shapes
        return answers
