"""Buckets behind one session: batches of certain sizes run on the variants that are there for them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ortprep.errors import LoadError
from ortprep.runtime.loading.bucket_selection import choose_bucket
from ortprep.runtime.loading.session import described_as

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.bundle.loader_config import LoaderConfig, Variant
    from ortprep.runtime.loading.binding import BoundRuns

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

BUCKETS = "_ortprep_buckets"
"""Attribute of a session with buckets: its `Buckets`."""

_MAX_CACHED = 1024


def serve_buckets(session: onnxruntime.InferenceSession, buckets: Buckets) -> None:
    """Has each batch that `session` runs go to the bucket for its sizes, if there is one.

    Methods that describe the session, and its bindings, are those of the variant for all shapes. If the
    session of a bucket cannot be created, the run that needs it raises the error, as `load` does.

    Args:
        session: The session for all shapes, which becomes an instance of a subclass of its class.
        buckets: The variants for certain sizes.
    """
    setattr(session, BUCKETS, buckets)
    plain: Any = type(session)
    session.__class__ = _bucketed_class(plain)


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
    buckets: Buckets | None = getattr(session, BUCKETS, None)
    chosen = None if buckets is None else buckets.choose(shapes)
    return session if chosen is None else chosen.session()


class Buckets:
    """The variants of a bundle for certain sizes, each with its session once a batch needs it.

    Args:
        read: Returns the bundle, with the variant for all shapes first and those of its buckets that this
        machine
            can run; it is called for the first batch.
        create: Makes the session of a bucket.
    """

    def __init__(
        self, read: Callable[[], LoaderConfig], create: Callable[[Variant], onnxruntime.InferenceSession]
    ) -> None:
        self._read = functools.cache(read)
        self._create = create
        self._sessions: dict[str, BucketSession] = {}
        self._known: dict[Shapes, BucketSession | None] = {}

    def fresh(self) -> Buckets:
        """Returns the same without a session."""
        return Buckets(self._read, self._create)

    def choose(self, shapes: Mapping[str, Sequence[int]]) -> BucketSession | None:
        """Returns the bucket for a batch of some shapes; None where the variant for all shapes takes it."""
        config = self._read()
        bucket = choose_bucket(config, config.variants[0], shapes=shapes)
        if bucket is None:
            return None
        return self._sessions.setdefault(bucket.name, BucketSession(bucket, self._create))

    def find(self, shapes: Shapes) -> BucketSession | None:
        """Does what `choose` does, and remembers it."""
        try:
            return self._known[shapes]
        except KeyError:
            chosen = self.choose(dict(shapes))
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[shapes] = chosen
            return chosen


class BucketSession:
    """A bucket with its session, which is made at its first use, once for all threads.

    What `create` raises is raised to that caller; the next caller tries again.
    """

    def __init__(self, bucket: Variant, create: Callable[[Variant], onnxruntime.InferenceSession]) -> None:
        self.needs_binding = bucket.io_binding
        self._bucket, self._create = bucket, create
        self._session: onnxruntime.InferenceSession | None = None
        self._bound: BoundRuns | None = None
        self._creating, self._running = threading.Lock(), threading.Lock()

    def session(self) -> onnxruntime.InferenceSession:
        """Returns the session; raises what `create` does."""
        if self._session is None:
            with self._creating:
                if self._session is None:
                    self._session = self._create(self._bucket)
        return self._session

    def run_bound(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Runs with inputs and outputs bound, as the variant needs it, while other threads wait.

        Raises as `session` does, and `LoadError` if there is no such output.
        """
        from ortprep.runtime.loading.binding import BoundRuns

        session = self.session()
        with self._running:
            if self._bound is None:
                self._bound = BoundRuns(session)
            answers = self._bound.run(feeds)
        unknown = [name for name in output_names or () if name not in answers]
        if unknown:
            raise LoadError(f"no such output: {', '.join(unknown)}\n  expected some of {', '.join(answers)}")
        return [answers[name] for name in output_names or answers]


@functools.cache
def _bucketed_class(plain: Any) -> type:
    """Returns the subclass of a session's class whose instances have buckets."""

    @functools.wraps(plain.run)
    def run(self: Any, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        shapes = _shapes_of_arrays(input_feed)
        chosen = None if shapes is None else self._ortprep_buckets.find(shapes)
        if chosen is None or (chosen.needs_binding and run_options is not None):
            return plain.run(self, output_names, input_feed, run_options)
        if chosen.needs_binding:
            return chosen.run_bound(output_names, input_feed)
        return chosen.session().run(output_names, input_feed, run_options)

    @functools.wraps(plain.run_with_ort_values)
    def run_with_ort_values(self: Any, output_names: Any, values: Any, run_options: Any = None) -> Any:
        shapes = _shapes_of_values(values)
        chosen = None if shapes is None else self._ortprep_buckets.find(shapes)
        # `session_for` gives the session of a variant that has to be bound.
        if chosen is None or chosen.needs_binding:
            return plain.run_with_ort_values(self, output_names, values, run_options)
        return chosen.session().run_with_ort_values(output_names, values, run_options)

    methods = {"run": run, "run_with_ort_values": run_with_ort_values}
    return described_as(plain, type(plain)(plain.__name__, (plain,), methods))


def _shapes_of_arrays(feed: Mapping[str, Any]) -> Shapes | None:
    try:
        shapes = tuple([(name, value.shape) for name, value in feed.items()])
    except AttributeError:
        return None
    # An `OrtValue` has a method of this name.
    return shapes if all(type(shape) is tuple for _, shape in shapes) else None


def _shapes_of_values(feed: Mapping[str, Any]) -> Shapes | None:
    if not all(value.is_tensor() for value in feed.values()):
        return None
    return tuple([(name, tuple(value.shape())) for name, value in feed.items()])
