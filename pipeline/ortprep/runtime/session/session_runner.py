"""Sessions of a model that is served: which one runs a batch, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from ortprep.errors import RunError
from ortprep.runtime.loading.binding import BoundRuns
from ortprep.runtime.loading.buckets import choose_bucket, find_buckets, with_runnable_buckets
from ortprep.runtime.loading.bundle_loader import open_bucket
from ortprep.runtime.loading.load_options import LoadOptions
from ortprep.runtime.loading.opened_bundle import OpenedBundle
from ortprep.runtime.loading.session import onnxruntime_errors
from ortprep.runtime.tensors.arrays import run_session, tensor_element_type
from ortprep.runtime.tensors.element_types import Array, element_type_of
from ortprep.runtime.tensors.signatures import Signature
from ortprep.runtime.verification.golden import check_answers

_MAX_CACHED = 1024

Shapes = tuple[tuple[int, ...], ...]
"""Of a batch's inputs, in the model's order."""

T = TypeVar("T")


class SessionRunner:
    """A session, run the way its variant and its types need it."""

    def __init__(self, signature: Signature, opened: OpenedBundle) -> None:
        self._name, self._opened, self._outputs = signature.model, opened, list(signature.outputs)
        self.session = opened.session
        kinds = [element_type_of(dtype) for dtype in signature.inputs.values()]
        outputs = [tensor_element_type(value.type) for value in opened.session.get_outputs()]
        self._is_native = not any(kinds) and not any(outputs)
        self._bound = BoundRuns(opened.session) if opened.variant.io_binding else None
        self._errors = onnxruntime_errors()

    def check(self) -> None:
        """Runs the golden sample; raises as `check_answers`."""
        opened = self._opened
        check_answers(self.session, opened.config, opened.root, variant=opened.variant)

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Runs on a batch; returns outputs in the model's order, or raises `RunError`."""
        try:
            if self._bound is not None:
                answers = self._bound.run(feeds)
            elif self._is_native:
                return list(self.session.run(self._outputs, feeds))
            else:
                answers = run_session(self.session, feeds)
            return [answers[name] for name in self._outputs]
        except self._errors as error:
            raise RunError(
                f"ONNX Runtime cannot run {self._name}\n  {type(error).__name__}: {error}"
            ) from None


class ShapeDispatcher(Generic[T]):
    """Sessions that serve one model: each batch runs on the one for its shapes.

    `config` is the bundle's, with no variants but these.
    """

    def __init__(
        self, opened: OpenedBundle, buckets: Sequence[OpenedBundle], make: Callable[[OpenedBundle], T]
    ) -> None:
        self._general = opened.variant
        self._names = tuple(tensor.name for tensor in opened.config.inputs)
        variants = tuple(bundle.variant for bundle in (opened, *buckets))
        self.config = dataclasses.replace(opened.config, variants=variants)
        self._made = {bundle.variant.name: make(bundle) for bundle in (opened, *buckets)}
        self._known: dict[Shapes, T] = {}
        self.variant, *rest = self._made
        self.buckets = tuple(rest)

    @property
    def all(self) -> tuple[T, ...]:
        """What serves each variant."""
        return tuple(self._made.values())

    def find(self, shapes: Shapes) -> T:
        """Returns what serves batches of some shapes, which are in the order of the bundle's inputs."""
        target = self._known.get(shapes)
        if target is None:
            named = dict(zip(self._names, shapes, strict=True))
            chosen = choose_bucket(self.config, self._general, shapes=named) or self._general
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            target = self._known[shapes] = self._made[chosen.name]
        return target


def open_buckets(opened: OpenedBundle, options: LoadOptions) -> list[OpenedBundle]:
    """Opens the shape buckets of a bundle that this machine can run; raises as `load` does."""
    runnable = with_runnable_buckets(opened.config, opened.variant, device_id=options.device_id)
    buckets = find_buckets(runnable, opened.variant)
    return [open_bucket(opened.root, opened.config, bucket, options) for bucket in buckets]
