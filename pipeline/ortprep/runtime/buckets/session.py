"""Sessions of one model: each batch runs on the one that was prepared for its sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ortprep.bundle.loader_config import LoaderConfig, Variant
from ortprep.errors import LoadError
from ortprep.runtime.buckets.selection import choose_bucket, find_buckets
from ortprep.runtime.session.session_proxy import SessionProxy

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.session.binding import BoundRuns

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
MakeSession = Callable[[Variant], "onnxruntime.InferenceSession"]

_MAX_CACHED = 1024


class VariantSession:
    """A variant with its session, which is made at its first use, once for all threads.

    What `make` raises is raised to that caller; the next caller tries again.
    """

    def __init__(
        self, variant: Variant, make: MakeSession, session: onnxruntime.InferenceSession | None = None
    ) -> None:
        self.variant = variant
        self._make = make
        self._session = session
        self._bound: BoundRuns | None = None
        self._is_closed = False
        self._making, self._running = threading.Lock(), threading.Lock()

    def session(self) -> onnxruntime.InferenceSession:
        """Returns the session; raises what `make` does, or `LoadError` if this was closed."""
        session = self._session
        if session is not None:
            return session
        with self._making:
            if self._is_closed:
                raise _closed_error(self.variant)
            if self._session is None:
                self._session = self._make(self.variant)
            return self._session

    def run_bound(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Runs with inputs and outputs bound, as the variant needs it, while other threads wait.

        Raises as `session` does, and `LoadError` if there is no such output.
        """
        from ortprep.runtime.session.binding import BoundRuns

        session = self.session()
        with self._running:
            if self._bound is None:
                self._bound = BoundRuns(session)
            answers = self._bound.run(feeds)
        unknown = [name for name in output_names or () if name not in answers]
        if unknown:
            raise LoadError(f"no such output: {', '.join(unknown)}\n  expected some of {', '.join(answers)}")
        return [answers[name] for name in output_names or answers]

    def close(self) -> None:
        """Lets the session go, and lets none be made; waits for one that is being made."""
        with self._making:
            self._is_closed, self._session = True, None
        with self._running:
            self._bound = None


class BucketedSession(SessionProxy):
    """The methods of `onnxruntime.InferenceSession` that jobs use, on the session prepared for each batch.

    That is the session of the bucket with the batch's sizes, else the one for all shapes. Methods that
    describe the session (inputs, options) describe the one for all shapes. It may be used from many threads.
    If a session cannot be created, the call that needs it raises the error, as `load` does.

    Args:
        config: The bundle, with the variant for all shapes and those of its buckets this machine can run.
        general: The variant for all shapes.
        session: Its session.
        make: Makes the session of a bucket.
    """

    def __init__(
        self,
        config: LoaderConfig,
        general: Variant,
        session: onnxruntime.InferenceSession,
        make: MakeSession,
    ) -> None:
        self._config = config
        self._general = VariantSession(general, make, session)
        self._buckets = {
            bucket.name: VariantSession(bucket, make) for bucket in find_buckets(config, general)
        }
        self._known: dict[Shapes, VariantSession] = {}
        self._is_closed = False

    def make_sessions(self) -> None:
        """Makes every session that is not made yet."""
        for variant in self._all():
            variant.session()

    def variant_for(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Returns the name of the variant that takes batches of these shapes, by input name."""
        return self._choose(shapes).variant.name

    def session_for(self, shapes: Mapping[str, Sequence[int]]) -> onnxruntime.InferenceSession:
        """Returns the session that takes batches of these shapes, which is made first if need be.

        It is for binding inputs and outputs, and for having it made before the first batch comes.
        """
        self._current()
        return self._choose(shapes).session()

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> Any:
        """Runs as `InferenceSession.run` does, on the session for the shapes of the batch.

        Where that has to be run with inputs and outputs bound, it is. Then `run_options` have no effect, so
        with them, and where a value is no array and has no shape, the batch goes to the one for all shapes.
        """
        chosen = self._find(_shapes_of_arrays(input_feed))
        if chosen is None:
            chosen = self._general
        elif chosen.variant.io_binding:
            if run_options is None:
                return chosen.run_bound(output_names, input_feed)
            chosen = self._general
        return chosen.session().run(output_names, input_feed, run_options)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, Any],
        run_options: Any = None,
    ) -> Any:
        """Runs as `InferenceSession.run_with_ort_values` does, on the session for the shapes of the batch.

        A variant that has to be run with inputs and outputs bound is passed over: `session_for` gives its
        session.
        """
        chosen = self._find(_shapes_of_values(input_dict_ort_values))
        if chosen is None or chosen.variant.io_binding:
            chosen = self._general
        return chosen.session().run_with_ort_values(output_names, input_dict_ort_values, run_options)

    def close(self) -> None:
        """Takes the sessions out of service: running calls finish, later ones raise `LoadError`."""
        self._is_closed = True
        self._known.clear()
        for variant in self._all():
            variant.close()

    def _current(self) -> onnxruntime.InferenceSession:
        return self._general.session()

    def _all(self) -> Iterable[VariantSession]:
        return (self._general, *self._buckets.values())

    def _find(self, shapes: Shapes | None) -> VariantSession | None:
        """Returns the session for a batch, None where it has no shapes to go by."""
        if shapes is None:
            return None
        try:
            return self._known[shapes]
        except KeyError:
            return self._learn(shapes)

    def _learn(self, shapes: Shapes) -> VariantSession | None:
        if self._is_closed:
            raise _closed_error(self._general.variant)
        if not all(isinstance(shape, tuple) for _, shape in shapes):
            return None  # the method of an `OrtValue`
        chosen = self._choose(dict(shapes))
        if len(self._known) >= _MAX_CACHED:
            self._known.clear()
        self._known[shapes] = chosen
        return chosen

    def _choose(self, shapes: Mapping[str, Sequence[int]]) -> VariantSession:
        bucket = choose_bucket(self._config, self._general.variant, shapes=shapes)
        return self._general if bucket is None else self._buckets[bucket.name]


def _shapes_of_arrays(feed: Mapping[str, Any]) -> Shapes | None:
    try:
        return tuple([(name, value.shape) for name, value in feed.items()])
    except AttributeError:
        return None


def _shapes_of_values(feed: Mapping[str, Any]) -> Shapes | None:
    if not all(value.is_tensor() for value in feed.values()):
        return None
    return tuple([(name, tuple(value.shape())) for name, value in feed.items()])


def _closed_error(variant: Variant) -> LoadError:
    return LoadError(f"session is closed: variant {variant.name}\n  expected one that is open")
