"""Inputs as they stay until a request is answered, whatever the caller does with its arrays meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pipeline.cluster.serving.packing import SMALL_BYTES
from pipeline.runtime.element_types import Array
from pipeline.runtime.pool.requests import Signature


class Store(Protocol):
    """The cluster's object store."""

    def put(self, array: Array) -> Any:
        """Returns what stands for a copy of an array."""

    def view(self, reference: Any) -> Array:
        """Returns that copy."""


class Inputs:
    """Keeps inputs: small ones as copies, those of large requests in the object store.

    Args:
        store: The object store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shared: dict[int, Any] = {}

    def keep(self, signature: Signature, arrays: Sequence[Array], size_bytes: int) -> list[Any]:
        """Returns what travels in the place of a request's arrays: arrays, or references.

        Args:
            signature: Of the model.
            arrays: In the model's order.
            size_bytes: Of all of them.

        Raises:
            PoolError: The object store does not take them.
        """
        pairs = zip(arrays, signature.inputs.values(), strict=True)
        if size_bytes <= SMALL_BYTES:
            return [np.array(array, dtype, order="C") for array, dtype in pairs]
        return [self._refer(array, dtype) for array, dtype in pairs]

    def share(self, array: Array) -> Array:
        """Returns an equal array that lies in the object store, from which several requests take it."""
        reference = self._store.put(array)
        view = self._store.view(reference)
        self._shared[id(view)] = reference
        weakref.finalize(view, self._shared.pop, id(view), None).atexit = False
        return view

    def _refer(self, array: Array, dtype: np.dtype[Any]) -> Any:
        reference = self._shared.get(id(array))
        # Not `ascontiguousarray`, which gives a scalar an axis.
        return self._store.put(np.asarray(array, dtype, order="C")) if reference is None else reference
