"""The client, `connect`: it imports numpy and built-in modules, and no ONNX Runtime."""

from __future__ import annotations

import _socket
import numbers
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ortprep.runtime import packets
from ortprep.runtime.host.folder import HostFolder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_RETRY_DELAY_S = 0.005
_MAX_ATTEMPTS = 3
_MAX_TIMEOUT_S = 1e9  # more does not fit the system's time
_MAX_IDLE = 4
"""Connections that a session keeps after several threads called at once."""


def connect(
    model: str | os.PathLike[str], *, start: bool = False, timeout_s: float = 60.0, idle_s: float = 600.0
) -> HostSession:
    """Connects to this user's host, which loads a model unless it is loaded, and returns a session.

    Args:
        model: A bundle's folder (a `Path`, or text with a `/`), or a name that the host was given.
        start: Whether to start a host if none runs. Such a host knows models by their folders only.
        timeout_s: Seconds after which connecting, and each request, is given up.
        idle_s: Seconds without a request after which a host that this starts ends.

    Raises:
        HostError: No host runs, it cannot be started, or its folder is not safe to use.
        HostDiedError: The host ended while it loaded the model.
        InvalidRequestError: `timeout_s` is no number of seconds up to 1e9, or the name is too long.
        RequestTimeoutError: The deadline passed.
        PipelineError: The host could not load the model, for a reason that `load` has.
    """
    path = os.fsdecode(model)
    if "/" in path or not isinstance(model, str):
        path = os.path.abspath(path)
    if len(os.fsencode(path)) > packets.MAX_TEXT_BYTES:
        raise _bad_request(f"name of the model is too long: {path[:80]!r}…")
    return HostSession(path, start=start, timeout_s=timeout_s, idle_s=idle_s)


class HostSession:
    """A model in the host, called as an `onnxruntime.InferenceSession`; `connect` makes it.

    Threads may share it: each that calls meanwhile has a connection of its own. After a fork, or if the host
    has ended since the last request, the next request connects again.
    """

    def __init__(self, model: str, *, start: bool, timeout_s: float, idle_s: float) -> None:
        self._model, self._start = model, start
        self._timeout_s, self._idle_s = timeout_s, idle_s
        self._idle: list[_Connection] = []
        self._is_closed = False
        self._call(None, timeout_s)

    def __enter__(self) -> HostSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
    ) -> list[NDArray[Any]]:
        """Runs the model in the host.

        Args:
            output_names: Names of outputs; None for all.
            input_feed: Arrays of numbers or booleans by name, with the model's types and shapes.
            timeout_s: Seconds after which the request is given up; None for those of `connect`.

        Returns:
            The outputs, as new arrays.

        Raises:
            InvalidRequestError: An input is missing, unknown or of another type, or an output is unknown, or
                `timeout_s` is no number of seconds up to 1e9.
            RunError: ONNX Runtime refused the request.
            RequestTimeoutError: The deadline passed; the host may still run the request.
            HostDiedError: The host ended before it answered. The call may be repeated.
            HostError: No host runs any more, or it broke the protocol.
        """
        arrays = {name: _as_array(name, value) for name, value in input_feed.items()}
        outputs = self._call(arrays, self._timeout_s if timeout_s is None else timeout_s)
        for name in output_names or ():
            if name not in outputs:
                from ortprep.errors import propose

                raise _bad_request(f"no such output: {name!r}\n  {propose(name, outputs)}")
        return [outputs[name] for name in (outputs if output_names is None else output_names)]

    def close(self) -> None:
        """Ends the connection; the model stays loaded in the host."""
        self._is_closed = True
        while (connection := self._take_idle()) is not None:
            connection.close()

    def _call(self, arrays: Mapping[str, NDArray[Any]] | None, timeout_s: float) -> dict[str, NDArray[Any]]:
        """Connects, and sends a request if there is one; returns its answer, or raises the host's error."""
        _check_timeout(timeout_s)
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        try:
            connection = self._connect(deadline_ns)
            with connection:  # an error ends it: the next answer would be taken for another's
                packet = None if arrays is None else connection.ask(arrays, deadline_ns)
                if packet is None and arrays is not None:
                    raise self._died("before it answered")
        except TimeoutError as error:
            from ortprep.errors import RequestTimeoutError

            problem = f"host did not answer within {timeout_s:g} s: {self._model}"
            raise RequestTimeoutError(problem, hint="a longer timeout_s") from error
        self._idle.append(connection)
        if self._is_closed:  # meanwhile
            self.close()
        elif len(self._idle) > _MAX_IDLE and (spare := self._take_idle()) is not None:
            spare.close()
        if packet is None:
            return {}
        _require(packet, packets.DONE)
        return packet.arrays

    def _connect(self, deadline_ns: int) -> _Connection:
        """Returns a connection that is the caller's, and on which the model is open."""
        if self._is_closed:
            raise _no_host(f"session is closed: {self._model}")
        while (connection := self._take_idle()) is not None:
            if connection.is_alive():
                return connection
            connection.close()
        for _ in range(_MAX_ATTEMPTS):  # a host that is ending may close a connection unanswered
            connection = _Connection(self._find_host(deadline_ns))
            with connection:
                packet = connection.ask(self._model, deadline_ns)
                if packet is not None:
                    _require(packet, packets.OPENED)
                    return connection
            connection.close()
        raise self._died("while it loaded the model")

    def _take_idle(self) -> _Connection | None:
        """Returns a connection that no thread uses, in one step; None if there is none."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _find_host(self, deadline_ns: int) -> _socket.socket:
        """Returns a connection to a host, which is started if it may be."""
        while True:
            try:
                folder = HostFolder(make=self._start)
            except FileNotFoundError:
                break
            try:
                sock = folder.connect(_remaining_s(deadline_ns))
                if sock is not None:
                    return sock
                if folder.acquire(wait=False):
                    if not self._start:
                        break
                    from ortprep.runtime.host.process import start_host

                    start_host(folder, idle_s=self._idle_s, timeout_s=_remaining_s(deadline_ns))
            finally:
                folder.close()
            time.sleep(_RETRY_DELAY_S)  # another client starts a host, or one is ending, or its queue is full
        raise _no_host("no host runs")

    def _died(self, when: str) -> Exception:
        from ortprep.errors import HostDiedError

        hint = "call again   (with connect(…, start=True), that starts another host)"
        return HostDiedError(f"host ended {when}: {self._model}\n  expected an answer, got none", hint=hint)


class _Connection:
    """A connection to a host, of one thread at a time; an error in `with` ends it."""

    def __init__(self, sock: _socket.socket) -> None:
        self._socket, self._pid = sock, os.getpid()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self.close()

    def ask(self, content: str | Mapping[str, NDArray[Any]], deadline_ns: int) -> packets.Packet | None:
        """Sends a model's name, or a request, and returns the answer, None if the host has ended."""
        try:
            self._socket.settimeout(_remaining_s(deadline_ns))
            if isinstance(content, str):
                packets.send(self._socket, packets.OPEN, os.fsencode(content), deadline_ns=deadline_ns)
            else:
                packets.send_arrays(self._socket, packets.RUN, content, deadline_ns=deadline_ns)
            self._socket.settimeout(_remaining_s(deadline_ns))
            return packets.receive(self._socket, "host")
        except ConnectionError:
            return None

    def is_alive(self) -> bool:
        """Returns whether it can be used: the host has not left, and this is no fork of who made it."""
        return self._pid == os.getpid() and not _has_ended(self._socket)

    def close(self) -> None:
        """Ends it."""
        self._socket.close()

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was interrupted before it had one
            self.close()


def _no_host(problem: str) -> Exception:
    from ortprep.errors import HostError

    return HostError(problem, hint="ortprep host BUNDLE   (or connect(…, start=True))")


def _as_array(name: str, value: Any) -> NDArray[Any]:
    """Returns an input as an array, if it can be sent."""
    array = np.asarray(value)
    if packets.can_send(name, array.dtype):
        return array
    hint = "ortprep.runtime.load(…) gives a session that takes all types"
    problem = f"input {str(name)[:80]!r} cannot be sent\n  expected numbers or booleans by a name"
    raise _bad_request(f"{problem}, got {array.dtype}", hint=hint)


def _check_timeout(timeout_s: Any) -> None:
    is_number = isinstance(timeout_s, numbers.Real)
    if not is_number or not abs(float(timeout_s)) <= _MAX_TIMEOUT_S:
        raise _bad_request(f"bad timeout: {timeout_s!r}\n  expected seconds, at most {_MAX_TIMEOUT_S:g}")


def _bad_request(problem: str, *, hint: str | None = None) -> Exception:
    from ortprep.errors import InvalidRequestError

    return InvalidRequestError(problem, hint=hint)


def _require(packet: packets.Packet, kind: int) -> None:
    """Raises the error in a packet, or the one for a packet of another kind than is due."""
    if packet.kind == kind:
        return
    from ortprep.errors import from_dict

    if packet.kind != packets.FAILED:
        raise packets.violation("host", f"expected an answer, got a packet of kind {packet.kind}")
    raise from_dict(packets.read_json(packet, "host"))


def _remaining_s(deadline_ns: int) -> float:
    """Returns the seconds until a deadline; raises `TimeoutError` if it has passed."""
    remaining_ns = deadline_ns - time.monotonic_ns()
    if remaining_ns <= 0:
        raise TimeoutError
    return remaining_ns / 1e9


def _has_ended(sock: _socket.socket) -> bool:
    """Returns whether the host closed a connection on which no answer is due."""
    sock.setblocking(False)
    try:
        sock.recv(1, _socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True  # the end, or an answer that nobody waits for
