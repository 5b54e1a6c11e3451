"""A lane: one connection to a worker, with at most one request at a time."""

from __future__ import annotations

import _socket
import math
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from ortprep.errors import (
    HostError,
    NoRoomError,
    PipelineError,
    PoolError,
    from_dict,
)
from ortprep.runtime.descriptors import close_aside
from ortprep.runtime.packets import (
    DONE,
    FAILED,
    MAX_ARRAYS_BYTES,
    RUN,
    Packet,
    place_arrays,
    read_json,
    receive,
    send_arrays,
    violation,
)
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature

if TYPE_CHECKING:
    from ortprep.runtime.pool.process import WorkerProcess
    from ortprep.runtime.pool.worker import Worker

Answer = dict[str, Array]
"""A model's outputs by name, in the model's order."""

_END_S = 1.0


class LostError(Exception):
    """The worker has ended, or is ended, before it answered.

    Attributes:
        is_to_blame: Whether the request is to blame: the worker had taken it off the connection.
    """

    def __init__(self, *, is_to_blame: bool = True) -> None:
        super().__init__()
        self.is_to_blame = is_to_blame


class LateError(Exception):
    """The deadline passed; the worker still has the request."""


class Lane:
    """A connection to a worker's process.

    Args:
        worker: The worker that has the process.
        process: The process.
        number: Of the lane, from 0.
        run_timeout_s: Seconds that one run may take; a worker that takes longer is killed.

    Attributes:
        is_answered: Whether the worker has no request of this lane; otherwise `finish` comes before the next.
    """

    def __init__(self, worker: Worker, process: WorkerProcess, number: int, run_timeout_s: float) -> None:
        self.worker, self.process = worker, process
        self._run_timeout_s = run_timeout_s
        self._socket = process.sockets[number]
        self._requests, self._answers = process.memory.requests(number), process.memory.answers(number)
        self._request, self._sent_s, self._milliseconds = 0, 0.0, 0
        self.is_answered = True

    def ask(
        self, model: int, signature: Signature, arrays: Mapping[str, Array], deadline: float = math.inf
    ) -> Answer:
        """Sends a request and returns the outputs, as arrays of this process.

        Args:
            model: Number of the model.
            signature: Its types.
            arrays: The inputs by name.
            deadline: When to stop waiting, by `time.monotonic()`.

        Raises:
            PipelineError: The worker says why it cannot answer.
            NoRoomError: There is no memory for the request or the answer.
            LateError: The deadline passed.
            LostError: The worker ended, or broke the protocol and was ended.
        """
        self._request, self._sent_s, self.is_answered = self._request + 1, time.monotonic(), False
        try:
            send_arrays(self._socket, RUN, arrays, self._requests, number=self._request, model=model)
        except ConnectionError as error:
            raise LostError(is_to_blame=False) from error
        except Exception as error:  # whatever it is, the worker has no request
            if self.process.ended.is_set():  # its memory is gone
                raise LostError(is_to_blame=False) from error
            self.is_answered = True
            if not isinstance(error, OSError):
                raise
            raise NoRoomError(f"request cannot be sent\n  {error}", hint="free -m") from error
        packet = self._receive(deadline)
        if packet.kind == FAILED:
            try:
                failure = from_dict(read_json(packet, self.worker.name))
            except HostError as error:
                raise self._break(error.message) from error
            raise failure
        got = [(name, array.dtype) for name, array in packet.arrays.items()]
        if packet.kind != DONE or got != list(signature.outputs.items()):
            text = ", ".join(f"{name}: {dtype}" for name, dtype in got) or "none"
            raise self._break(f"answer of {signature.model} has other outputs than the model: {text[:500]}")
        return packet.arrays

    def finish(self) -> None:
        """Waits for the answer that nobody waits for any more, or for the worker's end."""
        with suppress(NoRoomError, LostError):
            self._receive(math.inf)

    def _receive(self, deadline: float) -> Packet:
        """Returns the next packet; raises as `ask`."""
        while True:
            try:
                self._wait_at_most(min(deadline, self._find_limit()) - time.monotonic())
                packet = receive(self._socket, self.worker.name, self._answers)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    continue
                raise LateError from None
            except HostError as error:
                raise self._break(error.message) from error
            except MemoryError as error:
                self.is_answered = True
                raise NoRoomError("no memory for the copy of an answer") from error
            except ConnectionResetError as error:  # it ended with the request still in its socket
                raise LostError(is_to_blame=False) from error
            except OSError as error:  # also where the lane was closed meanwhile
                raise LostError from error
            if packet is None:
                raise LostError
            if packet.number != self._request:
                wrong = f"expected an answer to request {self._request}, got one to {packet.number}"
                raise self._break(violation(self.worker.name, wrong).message)
            self.is_answered, self.process.answered_s = True, time.monotonic()
            return packet

    def _wait_at_most(self, seconds: float) -> None:
        """Has the kernel end a call of the socket that takes longer.

        Python's own time limit takes three more system calls per request, each of which gives the GIL away.
        """
        milliseconds = max(1, math.ceil(1e3 * min(seconds, threading.TIMEOUT_MAX)))
        if milliseconds != self._milliseconds:
            time_limit = struct.pack("ll", milliseconds // 1000, milliseconds % 1000 * 1000)
            self._socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_RCVTIMEO, time_limit)
            self._milliseconds = milliseconds

    def _find_limit(self) -> float:
        """Returns when the worker has been at its request for too long; then it is killed.

        It does one run after the other, so this request's begins when the other lane's is answered, at worst.
        """
        limit = max(self._sent_s, self.process.answered_s) + self._run_timeout_s
        if limit > time.monotonic():
            return limit
        self.process.kill(
            PoolError(
                f"{self.worker.name} took too long for one request\n"
                f"  expected an answer within {self._run_timeout_s:g} s",
                hint="PoolConfig(run_timeout_s=…)",
            )
        )
        return math.inf

    def _break(self, problem: str) -> LostError:
        """Ends the worker, which broke the protocol."""
        self.process.kill(PoolError(problem))
        return LostError()

    def close(self) -> None:
        """Closes the connection."""
        close_aside(self._socket.close)

    def find_loss(self, timeout_s: float) -> PipelineError:
        """Waits until the worker has ended, and returns why.

        Raises:
            LateError: That takes longer than `timeout_s`.
        """
        if not self.process.ended.wait(min(timeout_s, _END_S)):
            self.process.kill(PoolError(f"{self.worker.name} closed its connection"))
        if not self.process.ended.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            raise LateError
        return self.process.error


def require_room(arrays: Mapping[str, Array]) -> None:
    """Raises `NoRoomError` for more bytes than a request can have."""
    end = place_arrays([array.nbytes for array in arrays.values()]).end
    if end > MAX_ARRAYS_BYTES:
        raise NoRoomError(
            f"batch does not fit a request\n  expected at most {MAX_ARRAYS_BYTES} bytes, got {end}",
            hint="send smaller batches",
        )
