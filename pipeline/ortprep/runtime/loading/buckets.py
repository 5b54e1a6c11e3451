"""Buckets: variants for batches of certain sizes, which run behind the session for all shapes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.loader_config import LoaderConfig, TensorSpec, Variant, find_buckets
from ortprep.runtime.loading.opened_bundle import serve_with

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.loading.load_options import LoadOptions
    from ortprep.runtime.loading.opened_bundle import OpenedBundle

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

_BUCKETS = "_ortprep_buckets"

_MAX_CACHED = 1024


def choose_bucket(
    config: LoaderConfig, general: Variant, *, shapes: Mapping[str, Sequence[int]]
) -> Variant | None:
    """Returns the variant that is there for batches of these shapes, None where the general one takes them.

    It is one whose every size the batch has, while all other axes are as the general variant takes them. Of
    several it is the one that binds most dimensions, and among those the bundle's first.

    Args:
        config: The bundle, with those of its variants that this machine can run.
        general: The variant that takes what no other does.
        shapes: Shapes of the batch by input name.
    """
    if shapes.keys() != {tensor.name for tensor in config.inputs}:
        return None
    fitting = [
        bucket
        for bucket in find_buckets(config, general)
        if _has_sizes(config.inputs, shapes, {**general.binding, **bucket.binding})
    ]
    return max(fitting, key=lambda bucket: len(bucket.binding), default=None)


def _has_sizes(
    inputs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]], binding: Mapping[str, int]
) -> bool:
    """Returns whether inputs of these shapes have the sizes that a bucket was bound to."""
    bound: set[str] = set()
    for tensor in inputs:
        shape = shapes[tensor.name]
        declared = (None,) * len(shape) if tensor.shape is None else tensor.shape
        if len(declared) != len(shape):
            return False
        for axis, (expected, size) in enumerate(zip(declared, shape, strict=True)):
            if isinstance(expected, int) and expected != size:
                return False
            names = binding.keys() & {expected, f"{tensor.name}[{axis}]"}
            if any(binding[name] != size for name in names):
                return False
            bound |= names
    # Sizes of dimensions that no input has cannot be read from a batch.
    return bound == binding.keys()


def with_runnable_buckets(config: LoaderConfig, variant: Variant, *, device_id: int | None) -> LoaderConfig:
    """Returns a bundle with one variant and those of its buckets that this machine can run.

    The reasons against the others are logged at WARNING.
    """
    from ortprep.runtime.loading.variant_selection import PassedOver, find_reasons_here

    runnable = []
    for bucket in find_buckets(config, variant):
        reasons = find_reasons_here(bucket, device_id=device_id)
        if reasons:
            import logging

            passed = PassedOver(bucket.name, reasons)
            logging.getLogger(__name__).warning("%s: bucket passed over: %s", config.name, passed)
        else:
            runnable.append(bucket)
    return config._replace(variants=(variant, *runnable))


def serve_buckets(
    opened: OpenedBundle, open_bucket: Callable[[Path, LoaderConfig, Variant, LoadOptions], OpenedBundle]
) -> None:
    """Has each batch that an opened bundle's session runs go to the bucket for its sizes, if there is one.

    Methods that describe the session, its bindings and runs on `OrtValue`s are those of the variant for all
    shapes. If the session of a bucket cannot be created, the run that needs it raises the error, as `load`
    does.
    """
    # Not `opened` itself, which holds the first session.
    root, config, variant, options = opened.root, opened.config, opened.variant, opened.later_options()
    buckets = Buckets(
        lambda: with_runnable_buckets(config, variant, device_id=options.device_id),
        lambda bucket: open_bucket(root, config, bucket, options),
    )
    serve_with(opened.session, _BUCKETS, buckets, _with_buckets)


def session_for(
    session: onnxruntime.InferenceSession, shapes: Mapping[str, Sequence[int]]
) -> onnxruntime.InferenceSession:
    """Returns the session that runs batches of some shapes, which is created first if need be.

    It is for binding inputs and outputs, and for creating it before the first batch comes.

    Args:
        session: What `load` returned.
        shapes: Shapes of a batch by input name.

    Raises:
        PipelineError: As `load`.
    """
    buckets: Buckets | None = getattr(session, _BUCKETS, None)
    named = tuple((name, tuple(shape)) for name, shape in shapes.items())
    return session if buckets is None else buckets.find(named) or session


class Buckets:
    """The variants of a bundle for certain sizes, each with its session once a batch needs it.

    Args:
        read: Returns the bundle, with the variant for all shapes first and those of its buckets that this
            machine can run; it is called for the first batch.
        open_bucket: Opens a bucket.
    """

    def __init__(
        self, read: Callable[[], LoaderConfig], open_bucket: Callable[[Variant], OpenedBundle]
    ) -> None:
        self._read = functools.cache(read)
        self._open = open_bucket
        self._creating = threading.Lock()
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self._known: dict[Shapes, Variant | None] = {}

    def find(self, shapes: Shapes) -> onnxruntime.InferenceSession | None:
        """Returns the session for a batch of some shapes; None where that for all shapes takes it.

        It is made at its first use, once for all threads. What `open_bucket` raises is raised to that caller;
        the next caller tries again.
        """
        try:
            bucket = self._known[shapes]
        except KeyError:
            config = self._read()
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            bucket = choose_bucket(config, config.variants[0], shapes=dict(shapes))
            self._known[shapes] = bucket
        if bucket is None:
            return None
        if bucket.name not in self._sessions:
            with self._creating:
                if bucket.name not in self._sessions:
                    self._sessions[bucket.name] = self._open(bucket).session
        return self._sessions[bucket.name]


def _with_buckets(own: Any) -> Mapping[str, Any]:
    """Returns the method of a session's class that runs batches in buckets."""
    plain_run = own.run

    @functools.wraps(plain_run)
    def run(self: Any, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        buckets = self._ortprep_buckets
        shapes = None if buckets is None else _shapes_of_arrays(input_feed)
        chosen = None if shapes is None else buckets.find(shapes)
        if chosen is None:
            return plain_run(self, output_names, input_feed, run_options)
        return chosen.run(output_names, input_feed, run_options)

    return {"run": run}


def _shapes_of_arrays(feed: Mapping[str, Any]) -> Shapes | None:
    try:
        shapes = tuple([(name, value.shape) for name, value in feed.items()])
    except AttributeError:
        return None
    # An `OrtValue` has a method of this name.
    return shapes if all(type(shape) is tuple for _, shape in shapes) else None
