"""A model in a worker: a session for batches of any shapes, and one for every bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.bundle.codec import encode
from pipeline.errors import LoadError, PoolError
from pipeline.runtime.loading.bundle_loader import LoadOptions, OpenedBundle, open_folder
from pipeline.runtime.loading.variant_selection import needs_gpu
from pipeline.runtime.pool.requests import read_signature
from pipeline.runtime.pool.served_session import ServedSession, WaitForMemory, Write
from pipeline.runtime.pool.session_runner import ByShapes, open_buckets
from pipeline.runtime.pool.tensor_headers import HeaderReader
from pipeline.runtime.pool.workplaces import limit_threads

if TYPE_CHECKING:
    from pipeline.bundle.session_record import SessionPlan
    from pipeline.runtime.pool.segments import AttachedSegments
    from pipeline.runtime.pool.wire import Frame, Span


def open_model(model: Mapping[str, Any], job: Mapping[str, Any]) -> ServedModel:
    """Opens a bundle as the worker's job says, and runs its golden sample.

    Args:
        model: `name`, `bundle`, `target`, `precision`, `buckets`, whether to open those too, and `config`,
            the loader config as the pool read it.
        job: `device`, `device_id`, `threads`, `may_spin`, `digests`, `session_options`.

    Raises:
        PipelineError: As `pipeline.runtime.load` does; or the bundle is another than the pool's.
    """

    def adapt(plan: SessionPlan) -> SessionPlan:
        return limit_threads(plan, job["threads"], may_spin=job["may_spin"])

    options = LoadOptions(
        target=model["target"],
        device_id=job["device_id"],
        digests=job["digests"],
        session_options=job["session_options"],
        check="golden",
        adapt=adapt,
        precision=model["precision"],
    )
    opened = open_folder(model["bundle"], options)
    if encode(opened.config) != model["config"]:
        raise LoadError(
            f"bundle was replaced by another build: {model['bundle']}\n"
            f"  expected the one that the pool began with, whose answers it would mix with this one's",
            hint="make a new pool",
        )
    if model["target"] is None and needs_gpu(opened.variant.requirements) != (job["device_id"] is not None):
        raise LoadError(
            f"{model['name']} has no variant that runs on {job['device']} here: {model['bundle']}\n"
            f"  got variant {opened.variant.name!r}; passed over: "
            f"{' | '.join(map(str, opened.passed_over)) or 'none'}",
            hint="SessionPool(…, devices='cpu'), or ortprep check " + model["bundle"],
        )
    return ServedModel(model["name"], opened, open_buckets(opened, options) if model["buckets"] else ())


class ServedModel:
    """A model's sessions, of which every request takes the one for its shapes.

    Args:
        name: Of the model.
        opened: The variant for all shapes.
        buckets: Those for certain sizes.
    """

    def __init__(self, name: str, opened: OpenedBundle, buckets: Sequence[OpenedBundle] = ()) -> None:
        self.name = name
        signature = read_signature(name, opened.config)
        self._inputs = tuple(signature.inputs)
        self._sessions = ByShapes(opened, buckets, partial(ServedSession, signature))
        self.variant, self.buckets = self._sessions.variant, self._sessions.buckets
        self._reader = HeaderReader()

    def check(self) -> None:
        """Runs the golden sample of every variant.

        Raises:
            LoadError: It is not answered as recorded.
            BundleError: It cannot be read.
        """
        for session in self._sessions.all:
            session.check()

    def run(
        self, frame: Frame, segments: AttachedSegments, write: Write, wait_for_memory: WaitForMemory
    ) -> tuple[Span, int, int]:
        """Answers a request.

        Returns:
            Where the answer is, how many bytes were copied for it, and the nanoseconds of the run.

        Raises:
            RunError: ONNX Runtime refused the request.
            PoolError: The request is unreadable, or there is no memory for the answer.
        """
        headers = self._reader.read(segments.bytes_of(frame.first))
        if len(headers) != len(self._inputs):
            raise PoolError(f"unreadable request\n  expected {len(self._inputs)} inputs, got {len(headers)}")
        shapes = tuple(header.shape for header in headers)
        session = self._sessions.find(shapes)
        if session is None:
            session = self._sessions.learn([self._inputs[header.position] for header in headers], shapes)
        return session.run(frame, headers, segments, write, wait_for_memory)
