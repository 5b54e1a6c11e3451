"""What a pool does beyond a single request, whatever its workers are: in terms of `submit` alone."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, Protocol, TypedDict, Unpack

import numpy as np

from ortprep.errors import InvalidRequestError, NoRoomError, PoolError
from ortprep.runtime.pool.admission import RequestOptions, WouldBlock
from ortprep.runtime.pool.futures import Answer, PoolFuture
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature, check_inputs

_LONG_COPY_BYTES = 2**20


class CallOptions(TypedDict, total=False):
    """How a request is served.

    Attributes:
        timeout_s: Seconds after which to give up; without it, the call waits as long as it takes.
        retries: How often the request may be tried on another worker after one died of it.
        copy: Whether large outputs too are to be arrays of their own.
    """

    timeout_s: float | None
    retries: int
    copy: bool


class RequestSubmitter(Protocol):
    """Where requests are handed in, as `BasePool` sees it."""

    def submit(self, model: str, inputs: Mapping[str, Any], options: RequestOptions) -> PoolFuture:
        """Takes a request and returns its future."""

    def run(self, model: str, inputs: Mapping[str, Any], options: RequestOptions) -> Answer:
        """Takes a request and waits for its answer."""

    def empty(self, model: str, name: str, shape: tuple[int, ...], options: RequestOptions) -> Array:
        """Returns an array for an input, to be filled in place."""


class BasePool(ABC):
    """The calls of a pool.

    Args:
        signatures: What the models take and give, by name.
        submitter: Where requests are handed in.
        long_copy_bytes: Inputs above this take too long to copy for an event loop to wait.
    """

    def __init__(
        self,
        signatures: Mapping[str, Signature],
        submitter: RequestSubmitter,
        *,
        long_copy_bytes: int = _LONG_COPY_BYTES,
    ) -> None:
        self._signatures = signatures
        self._submitter = submitter
        self._long_copy_bytes = long_copy_bytes

    def run(
        self, inputs: Mapping[str, Any], *, model: str | None = None, **options: Unpack[CallOptions]
    ) -> Answer:
        """Runs a model and returns its outputs by name, in the model's order.

        Args:
            inputs: Arrays by input name, of the model's types.
            model: Which one, if the pool has several.
            options: See `CallOptions`.

        Raises:
            InvalidRequestError: The inputs do not fit the model.
            RunError: ONNX Runtime refused the request.
            RequestTimeoutError: The deadline passed.
            WorkerDiedError: The worker died while it ran the request.
            PoolClosedError: The pool was closed.
            PoolError: There is no worker left for the model, or no memory.
        """
        name = self._model(model)
        return self._submitter.run(name, inputs, RequestOptions(**options))

    def submit(
        self, inputs: Mapping[str, Any], *, model: str | None = None, **options: Unpack[CallOptions]
    ) -> PoolFuture:
        """Does what `run` does, and returns a future at once, or as soon as there is room.

        Callbacks of the future are run on a thread of the pool and must not wait for it.

        Raises:
            InvalidRequestError: The inputs are not the model's.
            RequestTimeoutError: There was no room before the deadline.
            PoolClosedError: The pool is closed.
            PoolError: There is no worker left for the model, or no memory.
        """
        name = self._model(model)
        return self._submitter.submit(name, inputs, RequestOptions(**options))

    async def arun(
        self, inputs: Mapping[str, Any], *, model: str | None = None, **options: Unpack[CallOptions]
    ) -> Answer:
        """Does what `run` does, for asyncio; cancelling it cancels the request if no worker has it yet.

        A request that is cancelled while it waits for room is withdrawn as soon as it gets some.

        Raises:
            PoolError: As `run`.
        """
        name = self._model(model)
        request = RequestOptions(**options, may_wait=False)
        is_small = sum(getattr(value, "nbytes", 0) for value in inputs.values()) <= self._long_copy_bytes
        try:
            future = self._submitter.submit(name, inputs, request) if is_small else None
        except WouldBlock:
            future = None
        if future is None:  # the loop must not wait, be it for room or for a long copy
            request.may_wait = True
            submitting = asyncio.ensure_future(
                asyncio.to_thread(self._submitter.submit, name, inputs, request)
            )
            try:
                future = await asyncio.shield(submitting)
            except asyncio.CancelledError:
                request.may_wait = False
                submitting.add_done_callback(_take_back)
                raise
        return await asyncio.wrap_future(future)

    def map(
        self,
        batches: Iterable[Mapping[str, Any]],
        *,
        model: str | None = None,
        ordered: bool = True,
        in_flight: int | None = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[Answer]:
        """Runs many requests, a bounded number at a time, and yields their answers.

        Args:
            batches: Inputs of each request; read as answers are consumed, so it may be endless.
            model: Which one, if the pool has several.
            ordered: Whether answers come in the order of their requests, or as they are ready.
            in_flight: Maximum number of requests at a time; None for four per worker.
            options: Options of each request, see `CallOptions`.

        Raises:
            PoolError: As `run`, for the first request that fails; later ones are withdrawn.
        """
        name = self._model(model)
        futures: deque[PoolFuture] = deque()
        try:
            for batch in batches:
                while True:
                    request = RequestOptions(**options, may_wait=not futures)
                    try:
                        futures.append(self._submitter.submit(name, batch, request))
                        break
                    except (WouldBlock, NoRoomError):
                        if not futures:
                            raise
                    # There is no room, which may be for the answers that wait here.
                    yield _take(futures, ordered=ordered)
                if len(futures) >= (in_flight or max(8, 4 * self._count_workers())):
                    yield _take(futures, ordered=ordered)
            while futures:
                yield _take(futures, ordered=ordered)
        finally:
            for future in futures:
                future.cancel()

    def run_split(
        self,
        inputs: Mapping[str, Any],
        *,
        model: str | None = None,
        parts: int | None = None,
        **options: Unpack[CallOptions],
    ) -> Answer:
        """Cuts a batch along the first axis, runs the parts on all workers at once, and joins the answers.

        Args:
            inputs: Arrays by input name, all of one length along the first axis.
            model: Which model.
            parts: How many; None for one per worker that serves the model.
            options: Options of each part, see `CallOptions`.

        Returns:
            Outputs by name, the parts one after the other along the first axis, as new arrays.

        Raises:
            InvalidRequestError: The inputs cannot be cut.
            PoolError: An output has no axis that grows with the batch, or as `run`.
        """
        name = self._model(model)
        signature = self._signatures[name]
        arrays = dict(zip(signature.inputs, check_inputs(signature, inputs), strict=True))
        sizes = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
        count = sizes.pop() if len(sizes) == 1 else 0
        if not count:
            shapes = {key: array.shape for key, array in arrays.items()}
            raise InvalidRequestError(
                f"cannot split a batch of {name}\n  expected equal lengths, got {shapes}"
            )
        parts = max(1, min(count, parts or self._count_workers(name)))
        cut = zip(*(np.array_split(array, parts) for array in arrays.values()), strict=True)
        pieces = [dict(zip(arrays, piece, strict=True)) for piece in cut]
        lengths = [len(next(iter(piece.values()))) for piece in pieces]
        answers = list(self.map(pieces, model=name, in_flight=len(pieces), **options))
        return {
            output: _join(name, output, [answer[output] for answer in answers], lengths)
            for output in answers[0]
        }

    def run_all(
        self,
        inputs: Mapping[str, Any],
        *,
        models: Sequence[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> dict[str, Answer]:
        """Runs several models on the same inputs at once; each gets the inputs that it has.

        Args:
            inputs: Arrays by input name; large ones are moved once for all.
            models: Which; None for all of the pool.
            options: Options of each run, see `CallOptions`.

        Returns:
            Outputs by model.

        Raises:
            InvalidRequestError: An input belongs to none of the models.
            PoolError: As `run`.
        """
        names = [self._model(name) for name in (models or self._signatures)]
        unknown = [key for key in inputs if not any(key in self._signatures[name].inputs for name in names)]
        if unknown:
            raise InvalidRequestError(f"wrong inputs\n  expected those of {', '.join(names)}, got {unknown}")
        shared: dict[str, Any] = {}
        for key, value in inputs.items():
            takers = [name for name in names if key in self._signatures[name].inputs]
            shared[key] = (
                self._share(takers[0], key, value, options.get("timeout_s")) if len(takers) > 1 else value
            )
        futures: dict[str, PoolFuture] = {}
        try:
            for name in names:
                model_inputs = {key: shared[key] for key in self._signatures[name].inputs if key in shared}
                futures[name] = self.submit(model_inputs, model=name, **options)
            return {name: future.result() for name, future in futures.items()}
        finally:
            for future in futures.values():
                future.cancel()

    def empty(
        self, name: str, shape: Sequence[int], *, model: str | None = None, timeout_s: float | None = None
    ) -> Array:
        """Returns an array for an input, to be filled in place, where the pool would have it.

        Args:
            name: The input.
            shape: One size per axis. Slices of it along the first axis can be handed over too.
            model: Which model.
            timeout_s: Seconds to wait for memory; None as long as it takes.

        Raises:
            InvalidRequestError: The model has no such input, or a size is negative.
            RequestTimeoutError: There was no memory before the deadline.
            PoolError: All memory is held by arrays in use, or the pool is closed.
        """
        model = self._model(model)
        if name not in self._signatures[model].inputs:
            expected = ", ".join(self._signatures[model].inputs)
            raise InvalidRequestError(f"{model} has no input {name!r}\n  expected one of {expected}")
        sizes = tuple(int(size) for size in shape)
        if any(size < 0 for size in sizes):
            raise InvalidRequestError(f"bad shape\n  expected sizes from 0, got {list(shape)}")
        return self._submitter.empty(model, name, sizes, RequestOptions(timeout_s=timeout_s))

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models."""
        return tuple(self._signatures)

    @abstractmethod
    def _count_workers(self, model: str | None = None) -> int:
        """Returns how many workers there are, or serve a model."""

    @abstractmethod
    def _share(self, model: str, name: str, value: Any, timeout_s: float | None) -> Any:
        """Returns an input of several models as what is moved once for all of them."""

    def _model(self, model: str | None) -> str:
        if model is None and len(self._signatures) == 1:
            return next(iter(self._signatures))
        if model is None or model not in self._signatures:
            got = "none" if model is None else repr(model)
            raise InvalidRequestError(
                f"which model?\n  expected one of {', '.join(self._signatures)}, got {got}"
            )
        return model


def _take_back(submitted: asyncio.Future[PoolFuture]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()


def _take(futures: deque[PoolFuture], *, ordered: bool) -> Answer:
    if ordered:
        return futures.popleft().result()
    done, _ = wait(futures, return_when=FIRST_COMPLETED)
    future = next(future for future in futures if future in done)
    futures.remove(future)
    return future.result()


def _join(model: str, output: str, parts: list[Array], lengths: list[int]) -> Array:
    for part, length in zip(parts, lengths, strict=True):
        if part.ndim == 0 or part.shape[0] != length:
            raise PoolError(
                f"cannot join output {output!r} of {model}\n"
                f"  expected {length} along the first axis, got shape {list(part.shape)}",
                hint="run() takes the whole batch",
            )
    return np.concatenate(parts)
