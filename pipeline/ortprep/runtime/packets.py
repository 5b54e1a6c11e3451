"""Packets between a process that has models and one that asks it, and the memory of large arrays.

Host and client, and a pool and its workers, send the same packets, each one message of a sequenced-packet
socket: a head, a text (a name, JSON, or name, type and shape of each array) and data. Arrays of up to 16 KiB
in all travel in the packet. Larger ones of a client or host lie in a *region*: a memory file whose descriptor
travels with the packet. Those of a pool or worker lie in memory that both have mapped. A text has shapes and
no offsets: both sides compute the same offsets from shapes and item sizes, so arrays cannot overlap, and the
receiver checks where they end. What the other side sends is checked as if a stranger had sent it. Clients of
the host import this module, so it needs only numpy and built-in modules.
"""

from __future__ import annotations

import _socket  # `socket` itself takes as long to import as a client may take in all
import functools
import math
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ortprep.runtime.descriptors import (
    ANCILLARY_BYTES,
    Region,
    close_received,
    find_descriptors,
    find_seals,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from ortprep.errors import HostError

    Shape = tuple[int, ...]
    ReadArray = Callable[[np.dtype[Any], Shape, int], NDArray[Any]]
    """Returns the array of a type and shape that lies at an offset, in bytes."""

OPEN, RUN, STATUS = 1, 2, 3
"""What is asked."""

OPENED, DONE, FAILED, REPORT = 16, 17, 18, 19
"""What is answered: `DONE` with arrays, the others with JSON."""

INLINE_BYTES = 16 * 1024
"""Maximum data of arrays that travels in a packet; more lies in a region."""

MAX_PACKET_BYTES = 96 * 1024
"""Largest packet, under half of what a socket of Linux holds by default (`net.core.wmem_default`)."""

MAX_REGION_BYTES = 2**32
"""Largest request or answer: 4 GiB."""

MAX_TEXT_BYTES = 64 * 1024
MAX_RANK = 32
"""Maximum number of axes of an array, as in bundles."""

_HEAD, _MAGIC = struct.Struct("<8sBxHIqQQI"), b"ortprep3"
_NAMES = struct.Struct("<HB")
_NUMBERS = frozenset(np.dtype(code).name for code in "?bBhHiIqQefdFD")
_ALIGNMENT = 64
_MAX_CACHED = 1024


class Packet(NamedTuple):
    """A packet that was received.

    Attributes:
        deadline_ns: Time at which its sender stops waiting, by `time.monotonic_ns()`; 0 for never.
        number: Of a pool's request, which the answer repeats; 0 elsewhere.
        model: Number of the model, in a pool; 0 elsewhere.
        text: A name, or JSON.
        arrays: Arrays by name, of `RUN` and `DONE`, in memory that its sender does not have.
    """

    kind: int
    deadline_ns: int
    number: int
    model: int
    text: bytes
    arrays: dict[str, NDArray[Any]]


class Places(NamedTuple):
    """Where arrays lie.

    Attributes:
        offsets: Offset of each array, in bytes, a multiple of 64.
        end: End of the last one, in bytes, rounded up to a multiple of 64.
    """

    offsets: tuple[int, ...]
    end: int

    @property
    def is_inline(self) -> bool:
        """Whether the arrays are small enough to travel in the packet."""
        return self.end <= INLINE_BYTES


def place_arrays(sizes: Iterable[int]) -> Places:
    """Returns where arrays of some sizes, in bytes, lie: one after the other."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return Places(tuple(offsets), end)


class SharedWriter(Protocol):
    """Writes arrays into memory that both sides share, as `Region` does; no descriptor travels."""

    descriptor: None

    def write(self, arrays: Iterable[NDArray[Any]], places: Places) -> None:
        """Writes arrays to their places, in C order and native byte order."""


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
    number: int = 0,
    model: int = 0,
    data: bytes | bytearray = b"",
    region: Region | SharedWriter | None = None,
    size: int = 0,
) -> None:
    """Sends a packet, with the first `size` bytes of a region if there is one.

    Raises `OSError` if the other side left or does not read.
    """
    descriptor = None if region is None else region.descriptor
    rights = [] if descriptor is None else [struct.pack("i", descriptor)]
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, one) for one in rights]
    head = _HEAD.pack(_MAGIC, kind, arrays, len(text), deadline_ns, size, number, model)
    sock.sendmsg([head, text, data], ancillary, _socket.MSG_NOSIGNAL)


def send_json(sock: _socket.socket, kind: int, content: Mapping[str, Any], *, number: int = 0) -> None:
    """Sends JSON types; of an error that is too long, the beginning of its message. Raises as `send`."""
    import json

    text = json.dumps(content).encode()
    if len(text) > MAX_TEXT_BYTES:
        message = str(content.get("message"))[: MAX_TEXT_BYTES // 8]
        text = json.dumps({"kind": content.get("kind"), "message": message}).encode()
    send(sock, kind, text, number=number)


def read_json(packet: Packet, sender: str) -> dict[str, Any]:
    """Returns the JSON object that a packet has as its text; raises `HostError` if it has none."""
    import json

    try:
        content = json.loads(packet.text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise violation(sender, f"expected JSON, got a packet of kind {packet.kind}")
    return content


def receive(sock: _socket.socket, sender: str, read_shared: ReadArray | None = None) -> Packet | None:
    """Returns the next packet, None if the other side has left; no descriptor stays open.

    Args:
        sock: Connection to the other side.
        sender: Who that is, for errors.
        read_shared: Reads large arrays from memory that both sides share; None if they come in regions.

    Raises:
        HostError: It breaks the protocol.
        MemoryError: There is no memory for its arrays.
        OSError: There is none yet, or the connection is lost.
    """
    content, ancillary, flags, _ = sock.recvmsg(MAX_PACKET_BYTES, ANCILLARY_BYTES, _socket.MSG_CMSG_CLOEXEC)
    descriptors = find_descriptors(ancillary) if ancillary else []
    try:
        if not content:
            return None
        if flags & (_socket.MSG_TRUNC | _socket.MSG_CTRUNC) or len(content) < _HEAD.size:
            raise violation(sender, f"got a packet of {len(content)} bytes or more, or many descriptors")
        magic, kind, arrays, text_bytes, deadline_ns, size, number, model = _HEAD.unpack_from(content)
        begin = _HEAD.size + text_bytes
        if magic != _MAGIC or begin > len(content) or len(descriptors) != bool(size and read_shared is None):
            raise violation(sender, f"expected a head, got {content[: _HEAD.size].hex(' ')}")
        text = content[_HEAD.size : begin]
        if descriptors:
            _require_region(descriptors[0], size, sender)
        if kind not in (RUN, DONE):
            return Packet(kind, deadline_ns, number, model, text, {})
        data = descriptors[0] if descriptors else content[begin:]
        read = read_shared if size and read_shared else functools.partial(_read_array, data)
        try:
            found = _read_arrays(*_decode_text(text, arrays), read, size or len(content) - begin)
        except (struct.error, ValueError, TypeError, OverflowError, OSError) as error:
            raise violation(sender, f"its arrays are unreadable: {error}") from error
        return Packet(kind, deadline_ns, number, model, b"", found)
    finally:
        if descriptors:
            close_received(descriptors)


def _require_region(descriptor: int, size: int, sender: str) -> None:
    """Raises unless a descriptor is that of a region: reading from anything else might take for ever."""
    from fcntl import F_SEAL_SHRINK

    is_sealed = (find_seals(descriptor) or 0) & F_SEAL_SHRINK
    if not is_sealed or size > min(os.fstat(descriptor).st_size, MAX_REGION_BYTES):
        problem = f"expected at most {MAX_REGION_BYTES} bytes, sealed in size, and got {size}"
        raise violation(sender, f"its memory cannot be read: {problem}")


def send_arrays(
    sock: _socket.socket,
    kind: int,
    arrays: Mapping[str, NDArray[Any]],
    find_region: Callable[[], Region | SharedWriter],
    *,
    deadline_ns: int = 0,
    number: int = 0,
    model: int = 0,
) -> None:
    """Sends arrays of numbers by name: small ones in the packet, large ones in a region.

    Args:
        sock: Connection to the other side.
        kind: `RUN` or `DONE`.
        arrays: Arrays by name, of any shape and of types that ONNX knows but strings.
        find_region: Function that returns what to write them into.
        deadline_ns: Time at which the sender stops waiting, by `time.monotonic_ns()`; 0 for never.
        number: As in `Packet`.
        model: As in `Packet`.

    Raises:
        NoRoomError: They are too many or too large.
        OSError: The other side left or does not read, or there is no memory.
    """
    text, places = _encode_text(tuple([(name, one.dtype, one.shape) for name, one in arrays.items()]))
    is_small = len(text) <= MAX_TEXT_BYTES and places.end <= MAX_REGION_BYTES
    if not is_small or not all(_can_travel(one.dtype, one.shape) for one in arrays.values()):
        from ortprep.errors import NoRoomError

        shapes = ", ".join([f"{name} {list(one.shape)}" for name, one in arrays.items()])[:500]
        raise NoRoomError(f"arrays of {places.end} bytes do not fit a message: {shapes}")
    fields: dict[str, Any] = {"deadline_ns": deadline_ns, "number": number, "model": model}
    if places.is_inline:
        memory = bytearray(places.end)
        for array, offset in zip(arrays.values(), places.offsets, strict=True):
            if array.nbytes:
                np.ndarray(array.shape, array.dtype.newbyteorder("="), memory, offset)[...] = array
        send(sock, kind, text, arrays=len(arrays), data=memory, **fields)
    else:
        region = find_region()
        region.write(arrays.values(), places)
        send(sock, kind, text, arrays=len(arrays), region=region, size=places.end, **fields)


@functools.lru_cache(_MAX_CACHED)
def _encode_text(specs: tuple[tuple[str, np.dtype[Any], Shape], ...]) -> tuple[bytes, Places]:
    """Returns name, type and shape of arrays as bytes, and where the arrays lie."""
    texts, sizes = [], []
    for name, dtype, shape in specs:
        title, kind = name.encode(), (dtype.names[0] if dtype.names else dtype.name).encode()
        head = _NAMES.pack(len(title), len(kind)) + title + kind
        texts.append(head + struct.pack(f"<B{len(shape)}Q", len(shape), *shape))
        sizes.append(math.prod(shape) * dtype.itemsize)
    return b"".join(texts), place_arrays(sizes)


def _can_travel(dtype: np.dtype[Any], shape: Shape) -> bool:
    return len(shape) <= MAX_RANK and max((math.prod(shape) * dtype.itemsize, *shape)) < 2**62


@functools.lru_cache(_MAX_CACHED)
def _decode_text(text: bytes, count: int) -> tuple[dict[str, tuple[np.dtype[Any], Shape]], Places]:
    """Returns type and shape of arrays by name, and where the arrays lie.

    Raises:
        struct.error: It is cut short.
        ValueError: It contradicts itself, or no array of numbers is so.
    """
    specs: dict[str, tuple[np.dtype[Any], Shape]] = {}
    position = 0
    for _ in range(count):
        title_bytes, dtype_bytes = _NAMES.unpack_from(text, position)
        middle = position + _NAMES.size + title_bytes
        end = middle + dtype_bytes
        name, dtype = text[middle - title_bytes : middle].decode(), _find_dtype(text[middle:end].decode())
        (rank,) = struct.unpack_from("<B", text, end)
        shape = struct.unpack_from(f"<{rank}Q", text, end + 1)
        if not _can_travel(dtype, shape):
            raise ValueError(f"expected at most {MAX_RANK} axes of possible sizes, got {list(shape)}")
        specs[name], position = (dtype, shape), end + 1 + 8 * rank
    if position != len(text) or len(specs) != count:
        raise ValueError(f"expected {count} arrays with a name each")
    return specs, place_arrays([math.prod(shape) * dtype.itemsize for dtype, shape in specs.values()])


def _read_arrays(
    specs: Mapping[str, tuple[np.dtype[Any], Shape]], places: Places, read: ReadArray, size: int
) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a packet by name; they are checked and used as they are then.

    Args:
        specs: Type and shape of each, as `_decode_text` returns them.
        places: Where they lie.
        read: Reads one of them.
        size: Bytes of the memory in which they lie.

    Raises:
        ValueError: They lie outside of their memory, or a boolean is neither 0 nor 1.
        MemoryError: There is no memory for them.
        OSError: The same.
    """
    if places.end > min(size, MAX_REGION_BYTES):
        raise ValueError(f"arrays of {places.end} bytes lie outside of their memory")
    arrays = {}
    for (name, (dtype, shape)), offset in zip(specs.items(), places.offsets, strict=True):
        array = arrays[name] = read(dtype, shape, offset)
        # As `is_valid_bool`, whose module no client needs to import.
        if dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise ValueError("expected 0 or 1 for a boolean")
    return arrays


def _read_array(data: bytes | int, dtype: np.dtype[Any], shape: Shape, offset: int) -> NDArray[Any]:
    """Returns a copy of one array, read from bytes or from the region of a descriptor.

    A region is read, not mapped: its sender can change it at any time, and a page that is not to be had is an
    error of a read, and the end of a process that maps it. Raises as `_read_arrays`.
    """
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
    return array


def _find_dtype(name: str) -> np.dtype[Any]:
    """Returns the type of a name; raises `ValueError` unless it is one of numbers."""
    if name in _NUMBERS:
        return np.dtype(name)
    if name != "bfloat16":
        raise ValueError(f"{name[:40]!r} is no type of numbers")
    from ortprep.runtime.tensors.element_types import BFLOAT16

    return BFLOAT16
