"""Packets between a client and the host, and the memory of large arrays.

A packet has a head, a text (a name, JSON, or name, type and shape of each array) and data. What the other
side sends is checked as if a stranger had sent it. Clients import this module, so it needs only numpy and
built-in modules.
"""

from __future__ import annotations

import _socket  # `socket` itself takes as long to import as a client may take in all
import math
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ortprep.runtime.ipc import (
    ANCILLARY_BYTES,
    MAX_PACKET_BYTES,
    Places,
    close_aside,
    close_descriptors,
    copy_arrays,
    decode_shape,
    encode_shape,
    find_descriptors,
    place_arrays,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from ortprep.errors import HostError

OPEN, RUN, STATUS = 1, 2, 3
"""What a client sends."""

OPENED, DONE, FAILED, REPORT = 16, 17, 18, 19
"""What the host answers: `DONE` with arrays, the others with JSON."""

MAX_REGION_BYTES = 2**32
"""Largest request or answer: 4 GiB."""

MAX_TEXT_BYTES = 64 * 1024

_HEAD, _MAGIC = struct.Struct("<8sBxHIqQ"), b"ortprep2"
_NAMES = struct.Struct("<HB")
_NUMBERS = frozenset(np.dtype(code).name for code in "?bBhHiIqQefdFD")


class Packet(NamedTuple):
    """A packet that was received.

    Attributes:
        deadline_ns: Time at which its sender stops waiting, by `time.monotonic_ns()`; 0 for never.
        text: A name, or JSON.
        arrays: Arrays by name, of `RUN` and `DONE`, in memory that its sender does not have.
    """

    kind: int
    deadline_ns: int
    text: bytes
    arrays: dict[str, NDArray[Any]]


class Region:
    """Memory file that its sender writes arrays into, as often as it likes; it cannot shrink.

    Nothing maps it: to write a file is faster than to write memory whose pages the kernel adds one by one,
    and where there is no memory left, a write raises an error and a page ends the process.
    """

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        import fcntl  # here, as small requests do not need it

        self.descriptor = -1
        self.descriptor = os.memfd_create("ortprep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def write(self, arrays: Iterable[NDArray[Any]], places: Places) -> None:
        """Writes arrays in C order and native byte order; raises `OSError` if there is no memory."""
        for array, offset in zip(arrays, places.offsets, strict=True):
            plain = np.asarray(array, array.dtype.newbyteorder("="), order="C")
            remaining, position = plain.reshape(-1).view(np.uint8).data, offset
            while remaining:
                count = os.pwrite(self.descriptor, remaining, position)
                remaining, position = remaining[count:], position + count
        if os.fstat(self.descriptor).st_size < places.end:
            os.ftruncate(self.descriptor, places.end)

    def close(self) -> None:
        """Closes the descriptor; who received the file keeps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    __del__ = close


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
    data: bytes = b"",
    region: Region | None = None,
    size: int = 0,
) -> None:
    """Sends a packet, with the first `size` bytes of a region if there is one.

    Raises `OSError` if the other side left or does not read.
    """
    rights = None if region is None else struct.pack("i", region.descriptor)
    ancillary = [] if rights is None else [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)]
    head = _HEAD.pack(_MAGIC, kind, arrays, len(text), deadline_ns, size)
    sock.sendmsg([head, text, data], ancillary, _socket.MSG_NOSIGNAL)


def receive(sock: _socket.socket, sender: str) -> Packet | None:
    """Returns the next packet, None if the other side has left; no descriptor stays open.

    Raises:
        HostError: It breaks the protocol.
        MemoryError: There is no memory for its arrays.
        OSError: There is none yet, or the connection is lost.
    """
    content, ancillary, flags, _ = sock.recvmsg(MAX_PACKET_BYTES, ANCILLARY_BYTES, _socket.MSG_CMSG_CLOEXEC)
    descriptors = find_descriptors(ancillary)
    try:
        if not content:
            return None
        if flags & (_socket.MSG_TRUNC | _socket.MSG_CTRUNC) or len(content) < _HEAD.size:
            raise violation(sender, f"got a packet of {len(content)} bytes or more, or many descriptors")
        magic, kind, arrays, text_bytes, deadline_ns, size = _HEAD.unpack_from(content)
        begin = _HEAD.size + text_bytes
        if magic != _MAGIC or begin > len(content) or len(descriptors) != bool(size):
            raise violation(sender, f"expected a head, got {content[: _HEAD.size].hex(' ')}")
        text = content[_HEAD.size : begin]
        if size:
            _require_region(descriptors[0], size, sender)
        if kind not in (RUN, DONE):
            return Packet(kind, deadline_ns, text, {})
        data = descriptors[0] if size else content[begin:]
        return Packet(kind, deadline_ns, b"", _read_arrays(text, arrays, data, size, sender))
    finally:
        if descriptors:
            _close(descriptors)


def _close(descriptors: Sequence[int]) -> None:
    """Closes what came with a packet, at once if that is one region, as it should be."""
    if len(descriptors) == 1 and _find_seals(descriptors[0]) is not None:
        os.close(descriptors[0])
    else:
        close_aside(lambda: close_descriptors(descriptors))


def _find_seals(descriptor: int) -> int | None:
    """Returns the seals of a memory file, None for anything else."""
    import fcntl

    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return None


def _require_region(descriptor: int, size: int, sender: str) -> None:
    """Raises unless a descriptor is that of a region: reading from anything else might take for ever."""
    from fcntl import F_SEAL_SHRINK

    is_sealed = (_find_seals(descriptor) or 0) & F_SEAL_SHRINK
    if not is_sealed or size > min(os.fstat(descriptor).st_size, MAX_REGION_BYTES):
        problem = f"expected at most {MAX_REGION_BYTES} bytes, sealed in size, and got {size}"
        raise violation(sender, f"its memory cannot be read: {problem}")


def send_arrays(
    sock: _socket.socket,
    kind: int,
    arrays: Mapping[str, NDArray[Any]],
    find_region: Callable[[], Region],
    *,
    deadline_ns: int = 0,
) -> None:
    """Sends arrays of numbers by name: small ones in the packet, large ones in a region.

    Args:
        sock: Connection to the other side.
        kind: `RUN` or `DONE`.
        arrays: Arrays by name, of any shape and of types that ONNX knows but strings.
        find_region: Function that returns a region to write them into.
        deadline_ns: Time at which the sender stops waiting, by `time.monotonic_ns()`; 0 for never.

    Raises:
        HostError: They are too many or too large.
        OSError: The other side left or does not read, or there is no memory.
    """
    texts = []
    for name, array in arrays.items():
        title, dtype = name.encode(), _dtype_name(array.dtype).encode()
        texts.append(_NAMES.pack(len(title), len(dtype)) + title + dtype + encode_shape(array.shape))
    text = b"".join(texts)
    places = place_arrays([array.nbytes for array in arrays.values()])
    if len(text) > MAX_TEXT_BYTES or places.end > MAX_REGION_BYTES:
        raise violation("caller", f"{len(arrays)} arrays of {places.end} bytes are too many or too large")
    if places.is_inline:
        memory = bytearray(places.end)
        copy_arrays(arrays.values(), places.offsets, memory)
        send(sock, kind, text, arrays=len(arrays), deadline_ns=deadline_ns, data=bytes(memory))
    else:
        region = find_region()
        region.write(arrays.values(), places)
        send(sock, kind, text, arrays=len(arrays), deadline_ns=deadline_ns, region=region, size=places.end)


def _read_arrays(
    text: bytes, count: int, data: bytes | int, size: int, sender: str
) -> dict[str, NDArray[Any]]:
    """Returns copies of the arrays of a packet by name.

    They are checked and used as they are then. A region is read, not mapped: its sender can change it at any
    time, and a page that is not to be had is an error of a read, and the end of a process that maps it.

    Args:
        text: Name, type and shape of each.
        count: How many there are.
        data: Where they lie: bytes, or the descriptor of a region.
        size: Bytes of the region.
        sender: Who sent them, for errors.

    Raises:
        HostError: They are cut short, contradict themselves, lie outside, or are not of numbers.
        MemoryError: There is no memory for them.
    """
    specs: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    position = 0
    try:
        for _ in range(count):
            title_bytes, dtype_bytes = _NAMES.unpack_from(text, position)
            middle = position + _NAMES.size + title_bytes
            end = middle + dtype_bytes
            name, dtype = text[middle - title_bytes : middle].decode(), _find_dtype(text[middle:end].decode())
            shape, position = decode_shape(text, end, dtype.itemsize)
            specs[name] = dtype, shape
        if position != len(text) or len(specs) != count:
            raise ValueError(f"expected {count} arrays with a name each")
        places = place_arrays([math.prod(shape) * dtype.itemsize for dtype, shape in specs.values()])
        if places.end > (size if isinstance(data, int) else len(data)):
            raise ValueError(f"arrays of {places.end} bytes lie outside of their memory")
        return {
            name: _read_array(data, offset, dtype, shape)
            for (name, (dtype, shape)), offset in zip(specs.items(), places.offsets, strict=True)
        }
    except (struct.error, ValueError, TypeError, OverflowError, OSError) as error:
        raise violation(sender, f"its arrays are unreadable: {error}") from error


def _read_array(data: bytes | int, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Returns a copy of one array, read from bytes or from a region."""
    array = np.empty(shape, dtype)
    content = array.reshape(-1).view(np.uint8)
    if isinstance(data, int):
        remaining = content.data
        while remaining:
            count = os.preadv(data, [remaining], offset)
            if not count:
                raise ValueError("their memory ends before them")
            remaining, offset = remaining[count:], offset + count
    else:
        content[:] = np.ndarray(content.shape, np.uint8, data, offset)
    if dtype == np.bool_ and content.max(initial=0) > 1:
        # As `is_valid_bool`, whose module no client needs to import.
        raise ValueError("expected 0 or 1 for a boolean")
    return array


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.names[0] if dtype.names else dtype.name


def _find_dtype(name: str) -> np.dtype[Any]:
    """Returns the type of a name; raises `ValueError` unless it is one of numbers."""
    if name in _NUMBERS:
        return np.dtype(name)
    from ortprep.runtime.tensors.element_types import find_element_type

    kind = find_element_type(name)
    if kind is None:
        raise ValueError(f"{name[:40]!r} is no type of numbers")
    return kind.dtype
