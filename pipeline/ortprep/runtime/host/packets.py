"""Packets between a client and the host, and the memory of large arrays.

A packet has a head, a text (a name, JSON, or where each array lies) and data. What the other side sends is
checked as if a stranger had sent it. Clients import this module, so it needs only numpy and built-in modules.
"""

from __future__ import annotations

import _socket  # `socket` itself takes as long to import as a client may take in all
import math
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from ortprep.errors import HostError

OPEN, RUN, STATUS = 1, 2, 3
"""What a client sends."""

OPENED, DONE, FAILED, REPORT = 16, 17, 18, 19
"""What the host answers: `DONE` with arrays, the others with JSON."""

MAX_PACKET_BYTES = 96 * 1024
"""Largest packet, under half of what a socket of Linux holds by default (`net.core.wmem_default`)."""

MAX_REGION_BYTES = 2**32
"""Largest request or answer: 4 GiB."""

MAX_TEXT_BYTES = 64 * 1024

_INLINE_BYTES = 16 * 1024
_MAX_RANK, _ALIGNMENT = 64, 64
_HEAD, _MAGIC = struct.Struct("<8sBxHIqQ"), b"ortprep1"
_PLACE = struct.Struct("<HBBQ")
_ONE_DESCRIPTOR = _socket.CMSG_LEN(4)  # the kernel closes those that come beside it
_NUMBERS = frozenset(np.dtype(code).name for code in "?bBhHiIqQefdFD")


class Packet(NamedTuple):
    """A packet that was received.

    Attributes:
        arrays: Number of its arrays.
        deadline_ns: Time at which its sender stops waiting, by `time.monotonic_ns()`; 0 for never.
        data: Bytes, or the memory of its region; offsets of its arrays count from its beginning.
    """

    kind: int
    arrays: int
    deadline_ns: int
    text: bytes
    data: Any


class Region:
    """A memory file of a sealed size, so that no mapping of it can become invalid.

    Raises:
        OSError: There is no memory or no descriptor to be had.
    """

    __slots__ = ("descriptor", "memory")

    def __init__(self, size: int) -> None:
        import fcntl  # here, as small requests need neither
        import mmap

        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        self.descriptor = os.memfd_create("ortprep-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self.memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            os.close(self.descriptor)


def violation(sender: str, problem: str) -> HostError:
    """Returns the error for something that breaks the protocol."""
    from ortprep.errors import HostError

    hint = "ortprep host --stop   (if it is of another version of ortprep)"
    return HostError(f"{sender} broke the protocol\n  {problem}", hint=hint)


def send(
    sock: _socket.socket,
    kind: int,
    text: bytes = b"",
    *,
    arrays: int = 0,
    deadline_ns: int = 0,
    data: bytes | Region = b"",
) -> None:
    """Sends a packet; raises `OSError` if the other side left or does not read."""
    parts, ancillary, size = [text], [], 0
    if isinstance(data, Region):
        size = len(data.memory)
        ancillary.append((_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", data.descriptor)))
    else:
        parts.append(data)
    head = _HEAD.pack(_MAGIC, kind, arrays, len(text), deadline_ns, size)
    sock.sendmsg([head, *parts], ancillary, _socket.MSG_NOSIGNAL)


def receive(sock: _socket.socket, sender: str) -> Packet | None:
    """Returns the next packet, None if the other side has left; no descriptor stays open.

    Raises:
        HostError: It breaks the protocol.
        OSError: There is none yet, or the connection is lost.
    """
    content, ancillary, flags, _ = sock.recvmsg(MAX_PACKET_BYTES, _ONE_DESCRIPTOR, _socket.MSG_CMSG_CLOEXEC)
    descriptors = [
        descriptor
        for _, kind, value in ancillary
        if kind == _socket.SCM_RIGHTS
        for (descriptor,) in struct.iter_unpack("i", value)
    ]
    try:
        if not content:
            return None
        if flags & (_socket.MSG_TRUNC | _socket.MSG_CTRUNC) or len(content) < _HEAD.size:
            raise violation(sender, f"got a packet of {len(content)} bytes or more, or several descriptors")
        magic, kind, arrays, text_bytes, deadline_ns, size = _HEAD.unpack_from(content)
        begin = _HEAD.size + text_bytes
        if magic != _MAGIC or begin > len(content) or len(descriptors) != bool(size):
            raise violation(sender, f"expected a head, got {content[: _HEAD.size].hex(' ')}")
        data = _map_region(descriptors[0], size, sender) if size else content[begin:]
        return Packet(kind, arrays, deadline_ns, content[_HEAD.size : begin], data)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _map_region(descriptor: int, size: int, sender: str) -> mmap.mmap:
    """Maps a region for reading, if it is one."""
    import fcntl
    import mmap

    try:
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if is_sealed and size <= min(os.fstat(descriptor).st_size, MAX_REGION_BYTES):
            return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        problem = f"expected at most {MAX_REGION_BYTES} bytes, sealed in size, and got {size}"
    except OSError as error:
        problem = str(error.strerror)
    raise violation(sender, f"its memory cannot be mapped: {problem}")


def send_arrays(
    sock: _socket.socket,
    kind: int,
    arrays: Mapping[str, NDArray[Any]],
    find_region: Callable[[int], Region],
    *,
    deadline_ns: int = 0,
) -> None:
    """Sends arrays of numbers by name: small ones in the packet, large ones in a region.

    Args:
        sock: Connection to the other side.
        kind: `RUN` or `DONE`.
        arrays: Arrays by name, of any shape and of types that ONNX knows but strings.
        find_region: Function that returns a region of at least so many bytes.
        deadline_ns: Time at which the sender stops waiting, by `time.monotonic_ns()`; 0 for never.

    Raises:
        HostError: They are too many or too large.
        OSError: The other side left or does not read, or there is no memory.
    """
    places, begins, end = [], [], 0
    for name, array in arrays.items():
        title, dtype = name.encode(), _dtype_name(array.dtype).encode()
        place = struct.pack(f"<HBBQ{array.ndim}Q", len(title), len(dtype), array.ndim, end, *array.shape)
        places.append(place + title + dtype)
        begins.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    text = b"".join(places)
    if len(text) > MAX_TEXT_BYTES or end > MAX_REGION_BYTES:
        raise violation("caller", f"{len(arrays)} arrays of {end} bytes are too many or too large")
    region = find_region(end) if end > _INLINE_BYTES else None
    memory = bytearray(end) if region is None else region.memory
    for array, begin in zip(arrays.values(), begins, strict=True):
        if array.nbytes:
            np.ndarray(array.shape, array.dtype.newbyteorder("="), memory, begin)[...] = array
    data = bytes(memory) if region is None else region
    send(sock, kind, text, arrays=len(arrays), deadline_ns=deadline_ns, data=data)


def read_arrays(packet: Packet, sender: str) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a packet by name, where they lie.

    Raises:
        HostError: They are cut short, contradict themselves, lie outside, or are not of numbers.
    """
    arrays: dict[str, NDArray[Any]] = {}
    text, position = packet.text, 0
    try:
        for _ in range(packet.arrays):
            title_bytes, dtype_bytes, rank, offset = _PLACE.unpack_from(text, position)
            shape = struct.unpack_from(f"<{min(rank, _MAX_RANK)}Q", text, position + _PLACE.size)
            position += _PLACE.size + 8 * rank + title_bytes + dtype_bytes
            names = text[position - title_bytes - dtype_bytes : position]
            dtype = _find_dtype(names[title_bytes:].decode())
            if offset + math.prod(shape) * dtype.itemsize > len(packet.data):
                raise ValueError(f"{shape} at {offset} lies outside of its memory")
            arrays[names[:title_bytes].decode()] = np.ndarray(shape, dtype, packet.data, offset)
        if position != len(text) or len(arrays) != packet.arrays:
            raise ValueError(f"expected {packet.arrays} arrays with a name each")
    except (struct.error, ValueError, TypeError, OverflowError) as error:
        raise violation(sender, f"its arrays are unreadable: {error}") from error
    return arrays


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.names[0] if dtype.names else dtype.name


def _find_dtype(name: str) -> np.dtype[Any]:
    if name in _NUMBERS:
        return np.dtype(name)
    from ortprep.runtime.tensors.element_types import find_element_type

    kind = find_element_type(name)
    if kind is None:
        raise ValueError(f"{name[:40]!r} is no type of numbers")
    return kind.dtype
