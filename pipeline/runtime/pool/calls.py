"""What a pool does beyond a single request, whatever its workers are: in terms of `submit` alone."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, Protocol

import numpy as np

from pipeline.errors import InvalidRequestError, PoolError
from pipeline.runtime.element_types import Array
from pipeline.runtime.pool.arena import NoRoomError
from pipeline.runtime.pool.futures import Answer, PoolFuture
from pipeline.runtime.pool.gate import Order, WouldBlock
from pipeline.runtime.pool.requests import Signature, check_inputs, iterate_parts

_LONG_COPY_BYTES = 2**20


class Counter(Protocol):
    """Where requests are handed in, as `PoolCalls` sees it."""

    def submit(self, model: str, inputs: Mapping[str, Any], order: Order) -> PoolFuture:
        """Takes a request and returns its future."""

    def run(self, model: str, inputs: Mapping[str, Any], order: Order) -> Answer:
        """Takes a request and waits for its answer."""

    def empty(self, model: str, name: str, shape: tuple[int, ...], order: Order) -> Array:
        """Returns an array for an input, to be filled in place."""


class PoolCalls(ABC):
    """The calls of a pool.

    Args:
        signatures: What the models take and give, by name.
        counter: Where requests are handed in.
        long_copy_bytes: Inputs above this take too long to hand in for an event loop to wait.
    """

    def __init__(
        self,
        signatures: Mapping[str, Signature],
        counter: Counter,
        *,
        long_copy_bytes: int = _LONG_COPY_BYTES,
    ) -> None:
        self._signatures = signatures
        self._counter = counter
        self._long_copy_bytes = long_copy_bytes

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        copy: bool = False,
    ) -> Answer:
        """Runs a model and returns its outputs by name, in the model's order.

        Args:
            inputs: Arrays by input name, of the model's types.
            model: Which one, if the pool has several.
            timeout_s: Seconds after which to give up; None waits as long as it takes.
            retries: How often the request may be tried on another worker after one died of it.
            copy: Whether large outputs too are to be arrays of their own.

        Raises:
            InvalidRequestError: The inputs are not the model's.
            RunError: ONNX Runtime refused them.
            RequestTimeoutError: The deadline passed.
            WorkerDiedError: The worker died of it.
            PoolClosedError: The pool was closed.
            PoolError: There is no worker left for the model, or no memory.
        """
        order = Order(timeout_s=timeout_s, retries=retries, copies=copy)
        return self._counter.run(self._model(model), inputs, order)

    def submit(
        self,
        inputs: Mapping[str, Any],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        copy: bool = False,
    ) -> PoolFuture:
        """Does what `run` does, and returns a future at once, or as soon as there is room.

        Callbacks of the future are run on a thread of the pool and must not wait for it.

        Raises:
            InvalidRequestError: The inputs are not the model's.
            RequestTimeoutError: There was no room before the deadline.
            PoolClosedError: The pool is closed.
            PoolError: There is no worker left for the model, or no memory.
        """
        order = Order(timeout_s=timeout_s, retries=retries, copies=copy)
        return self._counter.submit(self._model(model), inputs, order)

    async def arun(
        self,
        inputs: Mapping[str, Any],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        copy: bool = False,
    ) -> Answer:
        """Does what `run` does, for asyncio; cancelling it takes the request back if no worker has it.

        One that is cancelled while it waits for room is taken back as soon as it has got some.

        Raises:
            PoolError: As `run`.
        """
        name = self._model(model)
        order = Order(timeout_s, retries, copies=copy, may_wait=False, begun=time.monotonic())
        is_small = sum(getattr(value, "nbytes", 0) for value in inputs.values()) <= self._long_copy_bytes
        try:
            future = self._counter.submit(name, inputs, order) if is_small else None
        except WouldBlock:
            future = None
        if future is None:  # the loop must not wait, be it for room or for a long copy
            order.may_wait = True
            handover = _Handover(lambda: self._counter.submit(name, inputs, order), order)
            try:
                future = await asyncio.to_thread(handover.make)
            except asyncio.CancelledError:
                handover.drop()
                raise
        return await asyncio.wrap_future(future)

    def map(
        self,
        batches: Iterable[Mapping[str, Any]],
        *,
        model: str | None = None,
        ordered: bool = True,
        in_flight: int | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        copy: bool = False,
    ) -> Iterator[Answer]:
        """Runs many requests, a bounded number at a time, and yields their answers.

        Args:
            batches: Inputs of each; read as answers are taken, so it may be endless.
            model: Which model.
            ordered: Whether answers come in the order of their requests, or as they are ready.
            in_flight: Most requests at a time; None for four per worker.
            timeout_s: Of each request.
            retries: Of each request.
            copy: As in `run`.

        Raises:
            PoolError: As `run`, at the request it concerns; those begun after it are taken back.
        """
        name = self._model(model)
        futures: deque[PoolFuture] = deque()
        try:
            for batch in batches:
                while True:
                    order = Order(timeout_s, retries, copies=copy, may_wait=not futures)
                    try:
                        futures.append(self._counter.submit(name, batch, order))
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
        timeout_s: float | None = None,
        retries: int = 0,
    ) -> Answer:
        """Cuts a batch along the first axis, runs the parts on all workers at once, and joins the answers.

        Args:
            inputs: Arrays by input name, all of one length along the first axis.
            model: Which model.
            parts: How many; None for one per worker that serves the model.
            timeout_s: Of each part.
            retries: Of each part.

        Returns:
            Outputs by name, the parts one after the other along the first axis, as arrays of their own.

        Raises:
            InvalidRequestError: The inputs cannot be cut.
            PoolError: An output has no axis that grows with the batch, or as `run`.
        """
        name = self._model(model)
        signature = self._signatures[name]
        arrays = dict(zip(signature.inputs, check_inputs(signature, inputs), strict=True))
        lengths = {array.shape[0] if array.ndim else None for array in arrays.values()}
        count = next(iter(lengths)) if len(lengths) == 1 else None
        if count is None or count == 0:
            shapes = {key: array.shape for key, array in arrays.items()}
            raise InvalidRequestError(
                f"cannot split a batch of {name}\n  expected equal lengths, got {shapes}"
            )
        slices = list(iterate_parts(count, parts or max(1, self._count_workers(name))))
        pieces = [{key: array[piece] for key, array in arrays.items()} for piece in slices]
        answers = list(
            self.map(pieces, model=name, in_flight=len(pieces), timeout_s=timeout_s, retries=retries)
        )
        return {
            output: _join(name, output, [answer[output] for answer in answers], slices)
            for output in answers[0]
        }

    def run_all(
        self,
        inputs: Mapping[str, Any],
        *,
        models: Sequence[str] | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
    ) -> dict[str, Answer]:
        """Runs several models on one input at once, each on those of the inputs that it has.

        Args:
            inputs: Arrays by input name; large ones are moved once for all.
            models: Which; None for all of the pool.
            timeout_s: Of each run.
            retries: Of each run.

        Returns:
            Outputs by model.

        Raises:
            InvalidRequestError: No model has an input of some name.
            PoolError: As `run`.
        """
        names = [self._model(name) for name in (models or self._signatures)]
        unknown = [key for key in inputs if not any(key in self._signatures[name].inputs for name in names)]
        if unknown:
            raise InvalidRequestError(f"wrong inputs\n  expected those of {', '.join(names)}, got {unknown}")
        shared: dict[str, Any] = {}
        for key, value in inputs.items():
            takers = [name for name in names if key in self._signatures[name].inputs]
            shared[key] = self._share(takers[0], key, value, timeout_s) if len(takers) > 1 else value
        futures: dict[str, PoolFuture] = {}
        try:
            for name in names:
                own = {key: shared[key] for key in self._signatures[name].inputs if key in shared}
                futures[name] = self.submit(own, model=name, timeout_s=timeout_s, retries=retries)
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
            InvalidRequestError: The model has no such input, or the shape is none.
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
        return self._counter.empty(model, name, sizes, Order(timeout_s=timeout_s))

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


class _Handover:
    """A request that a thread hands in for who may not wait for it to be done."""

    def __init__(self, submit: Callable[[], PoolFuture], order: Order) -> None:
        self._submit, self._order = submit, order
        self._lock = threading.Lock()
        self._future: PoolFuture | None = None
        self._is_dropped = False

    def make(self) -> PoolFuture:
        future = self._submit()
        with self._lock:
            self._future, is_dropped = future, self._is_dropped
        if is_dropped:
            future.cancel()
        return future

    def drop(self) -> None:
        self._order.may_wait = False
        with self._lock:
            future, self._is_dropped = self._future, True
        if future is not None:
            future.cancel()


def _take(futures: deque[PoolFuture], *, ordered: bool) -> Answer:
    if ordered:
        return futures.popleft().result()
    done, _ = wait(futures, return_when=FIRST_COMPLETED)
    future = next(future for future in futures if future in done)
    futures.remove(future)
    return future.result()


def _join(model: str, output: str, parts: list[Array], slices: list[slice]) -> Array:
    for part, piece in zip(parts, slices, strict=True):
        if part.ndim == 0 or part.shape[0] != piece.stop - piece.start:
            raise PoolError(
                f"output {output!r} of {model} cannot be put together\n"
                f"  expected {piece.stop - piece.start} along the first axis, got shape {list(part.shape)}",
                hint="run() takes the whole batch",
            )
    return np.concatenate(parts)
