"""Sessions of a model that is served: which one runs a batch, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from pipeline.errors import RunError
from pipeline.runtime.bucket_choice import choose_bucket, find_buckets
from pipeline.runtime.bucket_opening import open_bucket, with_runnable_buckets
from pipeline.runtime.element_types import Array, element_type_of
from pipeline.runtime.golden import check_answers
from pipeline.runtime.loading.bundle_loader import LoadOptions, OpenedBundle
from pipeline.runtime.loading.session import onnxruntime_errors
from pipeline.runtime.pool.requests import Signature
from pipeline.runtime.tensors import fit_feeds, half_inputs, run_session

if TYPE_CHECKING:
    import onnxruntime

_REMEMBERED = 1024

Shapes = tuple[tuple[int, ...], ...]
"""Of a batch's inputs, in the model's order."""

T = TypeVar("T")


class Bound(Protocol):
    """Runs of a session that bind its inputs and outputs."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs on a batch and returns its outputs by name, as arrays on the host."""


class SessionRunner:
    """A session, run the way its variant and its types need it.

    Args:
        signature: Of the model.
        opened: What it was opened as.
        bind: Makes the bound runs of a session whose variant wants them.

    Attributes:
        session: The session.
        is_native: Whether numpy has all its types.
        bound: Its bound runs; None where its variant wants none.
        errors: What ONNX Runtime raises.
    """

    def __init__(
        self,
        signature: Signature,
        opened: OpenedBundle,
        bind: Callable[[onnxruntime.InferenceSession], Bound],
    ) -> None:
        self._name, self._opened, self._outputs = signature.model, opened, list(signature.outputs)
        self.session = opened.session
        kinds = [element_type_of(dtype) for dtype in signature.inputs.values()]
        outputs = [value.type for value in opened.session.get_outputs()]
        self.is_native = not any(kinds) and all(map(_is_native, outputs))
        halves = half_inputs(opened.session)
        self._narrowed = [name for name in halves if signature.inputs[name] == np.float32]
        self.bound = bind(opened.session) if opened.variant.io_binding else None
        self.errors = onnxruntime_errors()

    def check(self) -> None:
        """Runs the golden sample.

        Raises:
            LoadError: It is not answered as recorded.
            BundleError: It cannot be read.
        """
        opened = self._opened
        check_answers(self.session, opened.config, opened.root, variant=opened.variant)

    def fit(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Returns a batch in the session's own types, where the variant's are narrower than the model's."""
        return fit_feeds(feeds, self._narrowed) if self._narrowed else feeds

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Runs on what `fit` returned, and returns the outputs in the model's order.

        Raises:
            RunError: ONNX Runtime refused it.
        """
        try:
            return self.attempt(feeds)
        except self.errors as error:
            raise self.refusal(error) from None

    def refusal(self, error: BaseException) -> RunError:
        """Returns what the caller is told of an error of ONNX Runtime."""
        return RunError(f"ONNX Runtime cannot run {self._name}\n  {type(error).__name__}: {error}")

    def attempt(self, feeds: Mapping[str, Array]) -> list[Any]:
        """Does what `run` does, and leaves errors as they are.

        Raises:
            Exception: One of `errors`.
        """
        if self.bound is not None:
            answers = self.bound.run(feeds)
        elif self.is_native:
            return list(self.session.run(self._outputs, feeds))
        else:
            answers = run_session(self.session, feeds)
        return [answers[name] for name in self._outputs]


class ByShapes(Generic[T]):
    """What serves a model, of which every batch takes the one for its shapes.

    Args:
        opened: The variant for all shapes.
        buckets: Those for certain sizes.
        make: Makes what serves a variant.

    Attributes:
        config: The bundle's, with no variants but these.
        variant: Name of the variant for all shapes.
        buckets: Names of those for certain sizes.
    """

    def __init__(
        self, opened: OpenedBundle, buckets: Sequence[OpenedBundle], make: Callable[[OpenedBundle], T]
    ) -> None:
        self._general = opened.variant
        variants = tuple(one.variant for one in (opened, *buckets))
        self.config = dataclasses.replace(opened.config, variants=variants)
        self._made = {one.variant.name: make(one) for one in (opened, *buckets)}
        self._known: dict[Shapes, T] = {}
        self.variant, *rest = self._made
        self.buckets = tuple(rest)

    @property
    def all(self) -> tuple[T, ...]:
        """What serves each variant."""
        return tuple(self._made.values())

    def find(self, shapes: Shapes) -> T | None:
        """Returns what serves batches of some shapes; None if that is yet to be learnt."""
        return self._known.get(shapes)

    def learn(self, names: Sequence[str], shapes: Shapes) -> T:
        """Chooses what serves batches of some shapes from now on, and returns it.

        Args:
            names: Of the inputs, always in the same order.
            shapes: Of these.
        """
        named = dict(zip(names, shapes, strict=True))
        chosen = choose_bucket(self.config, self._general, shapes=named) or self._general
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        made = self._known[shapes] = self._made[chosen.name]
        return made


def open_buckets(opened: OpenedBundle, options: LoadOptions) -> list[OpenedBundle]:
    """Opens the shape buckets of a bundle that this machine can run.

    Args:
        opened: The variant for all shapes.
        options: What it was opened by.

    Raises:
        PipelineError: As `pipeline.runtime.load` does.
    """
    runnable = with_runnable_buckets(opened, device_id=options.device_id)
    found = find_buckets(runnable, opened.variant)
    return [open_bucket(opened.root, opened.config, bucket, options) for bucket in found]


def _is_native(type_name: str) -> bool:
    name = type_name.removeprefix("tensor(").removesuffix(")")
    return name in _NATIVE_TYPES


_NATIVE_TYPES = frozenset(
    {"float", "double", "float16", "bool"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
