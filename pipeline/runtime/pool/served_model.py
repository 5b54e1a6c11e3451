"""A model in a worker: a session for batches of any shapes, and one for every bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.bundle.codec import encode
from pipeline.errors import LoadError, PoolError
from pipeline.runtime.background_import import BackgroundImport
from pipeline.runtime.bucket_choice import choose_bucket, find_buckets
from pipeline.runtime.bucket_opening import open_bucket, with_runnable_buckets
from pipeline.runtime.deadline import Deadline
from pipeline.runtime.opening import OpenedBundle, Wishes, open_bundle
from pipeline.runtime.pool.requests import read_signature
from pipeline.runtime.pool.served_session import ServedSession, Shapes, WaitForMemory, Write
from pipeline.runtime.pool.tensor_headers import HeaderReader, TensorHeader
from pipeline.runtime.pool.workplaces import limit_threads
from pipeline.runtime.selection import needs_gpu

if TYPE_CHECKING:
    from pipeline.runtime.pool.segments import AttachedSegments
    from pipeline.runtime.pool.wire import Frame, Span
    from pipeline.runtime.session import SessionPlan

_REMEMBERED = 1024


def open_model(model: Mapping[str, Any], job: Mapping[str, Any]) -> ServedModel:
    """Opens a bundle as the worker's job says, and runs its golden sample.

    Args:
        model: `name`, `bundle`, `target`, `precision`, `buckets`, whether to open those too, and `config`,
            the loader config as the pool read it.
        job: `device`, `device_id`, `threads`, `may_spin`, `digests`.

    Raises:
        PipelineError: As `pipeline.runtime.load` does; or the bundle is another than the pool's.
    """

    def adapt(plan: SessionPlan) -> SessionPlan:
        return limit_threads(plan, job["threads"], may_spin=job["may_spin"])

    wishes = Wishes(
        target=model["target"],
        device_id=job["device_id"],
        digests=job["digests"],
        check="golden",
        deadline=Deadline(None, bundle=Path(model["bundle"])),
        adapt=adapt,
        precision=model["precision"],
    )
    opened = open_bundle(Path(model["bundle"]), wishes, BackgroundImport())
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
    if not model["buckets"]:
        return ServedModel(model["name"], opened)
    runnable = with_runnable_buckets(opened.chosen, device_id=job["device_id"])
    buckets = find_buckets(runnable, opened.variant)
    return ServedModel(
        model["name"], opened, [open_bucket(opened.chosen, bucket, wishes) for bucket in buckets]
    )


class ServedModel:
    """A model's sessions, of which every request takes the one for its shapes.

    Args:
        name: Of the model.
        opened: The variant for all shapes.
        buckets: Those for certain sizes.
    """

    def __init__(self, name: str, opened: OpenedBundle, buckets: Sequence[OpenedBundle] = ()) -> None:
        self.name, self.variant = name, opened.variant.name
        self.buckets = tuple(one.variant.name for one in buckets)
        signature = read_signature(name, opened.config)
        self._inputs = tuple(signature.inputs)
        self._general = opened.variant
        self._config = dataclasses.replace(
            opened.config, variants=tuple(one.variant for one in (opened, *buckets))
        )
        self._sessions = {one.variant.name: ServedSession(signature, one) for one in (opened, *buckets)}
        self._reader = HeaderReader()
        self._known: dict[Shapes, ServedSession] = {}

    def check(self) -> None:
        """Runs the golden sample of every variant.

        Raises:
            LoadError: It is not answered as recorded.
            BundleError: It cannot be read.
        """
        for session in self._sessions.values():
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
        session = self._known.get(shapes)
        if session is None:
            session = self._learn(headers, shapes)
        return session.run(frame, headers, segments, write, wait_for_memory)

    def _learn(self, headers: Sequence[TensorHeader], shapes: Shapes) -> ServedSession:
        named = {self._inputs[header.position]: header.shape for header in headers}
        chosen = choose_bucket(self._config, self._general, shapes=named) or self._general
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        session = self._known[shapes] = self._sessions[chosen.name]
        return session
