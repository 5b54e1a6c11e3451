"""Messages between a process that has models and one that asks it.

Host and client, and a pool and its workers, send the same messages: a head, a text (a name, JSON, or name,
type and shape of each array) and the arrays' bytes, one after the other. Between host and client there is a
stream. A pool and a worker have sequenced packets, and arrays of more than 16 KiB in all lie in memory that
both have mapped. A text has shapes and no offsets: both sides compute the same offsets from shapes and item
sizes, so arrays cannot overlap, and the receiver checks where they end. What the other side sends is checked
as if a stranger had sent it. Clients of the host import this module, so it needs only numpy and built-in
modules.
"""

from __future__ import annotations

import _socket  # `socket` itself takes as long to import as a client may take in all
import functools
import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ortprep.runtime.descriptors import ANCILLARY_BYTES, close_received

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from ortprep.errors import HostError
    from ortprep.runtime.pool.memory import Window

    Shape = tuple[int, ...]

OPEN, RUN, STATUS = 1, 2, 3
"""What is asked."""

OPENED, DONE, FAILED, REPORT = 16, 17, 18, 19
"""What is answered: `DONE` with arrays, the others with JSON."""

INLINE_BYTES = 16 * 1024
"""Maximum data of arrays that travels in a packet; more lies in memory that both sides share."""

MAX_PACKET_BYTES = 96 * 1024
"""Largest packet, under half of what a socket of Linux holds by default (`net.core.wmem_default`)."""

MAX_ARRAYS_BYTES = 2**32
"""Largest request or answer: 4 GiB."""

MAX_TEXT_BYTES = 64 * 1024
MAX_RANK = 32
"""Maximum number of axes of an array, as in bundles."""

_HEAD, _MAGIC = struct.Struct("<8sBxHIqQI"), b"ortprep4"
_NAMES = struct.Struct("<HB")
_NUMBERS = frozenset(np.dtype(code).name for code in "?bBhHiIqQefdFD")
_BFLOAT16 = "bfloat16"
_ALIGNMENT = 64
_MAX_CACHED = 1024


class Packet(NamedTuple):
    """A message that was received.

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
    """Where arrays lie in shared memory.

    Attributes:
        offsets: Offset of each array, in bytes, a multiple of 64.
        end: End of the last one, in bytes, rounded up to a multiple of 64.
    """

    offsets: tuple[int, ...]
    end: int

    @property
    def is_inline(self) -> bool:
        """Whether the arrays are small enough to travel in a packet instead."""
        return self.end <= INLINE_BYTES


def place_arrays(sizes: Iterable[int]) -> Places:
    """Returns where arrays of some sizes, in bytes, lie: one after the other."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return Places(tuple(offsets), end)


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
    data: bytes = b"",
) -> None:
    """Sends a message, or the beginning of one; raises `OSError` if the other side left or does not read."""
    head = _HEAD.pack(_MAGIC, kind, arrays, len(text), deadline_ns, number, model)
    sock.sendall(b"".join((head, text, data)), _socket.MSG_NOSIGNAL)


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


def receive(sock: _socket.socket, sender: str, shared: Window | None = None) -> Packet | None:
    """Returns the next message, None if the other side has left; no descriptor stays open.

    Args:
        sock: Connection to the other side.
        sender: Who that is, for errors.
        shared: Memory that large arrays are in; None if they travel.

    Raises:
        HostError: It breaks the protocol.
        MemoryError: There is no memory for its arrays.
        OSError: There is none yet, or the connection is lost.
    """
    content, ancillary, _, _ = sock.recvmsg(MAX_PACKET_BYTES, ANCILLARY_BYTES, _socket.MSG_CMSG_CLOEXEC)
    if ancillary:
        close_received(ancillary)
        raise violation(sender, "it sent descriptors")
    if not content:
        return None
    content = _receive_rest(sock, content, _HEAD.size, sender)
    magic, kind, arrays, text_bytes, deadline_ns, number, model = _HEAD.unpack_from(content)
    if magic != _MAGIC or text_bytes > MAX_TEXT_BYTES:
        raise violation(sender, f"expected a head, got {content[: _HEAD.size].hex(' ')}")
    begin = _HEAD.size + text_bytes
    content = _receive_rest(sock, content, begin, sender)
    text = content[_HEAD.size : begin]
    found: dict[str, NDArray[Any]] = {}
    rest = memoryview(content)[begin:]
    if kind in (RUN, DONE):
        try:
            specs, places = _decode_text(text, arrays)
            found, rest = _read_arrays(sock, specs, places, rest, shared)
        except (struct.error, ValueError, TypeError, OverflowError) as error:
            raise violation(sender, f"its arrays are unreadable: {error}") from error
        text = b""
    if rest:
        raise violation(sender, f"got {len(rest)} bytes too many")
    return Packet(kind, deadline_ns, number, model, text, found)


def _receive_rest(sock: _socket.socket, content: bytes, size: int, sender: str) -> bytes:
    """Returns what has come of a message, with at least so many bytes of it; raises as `receive`."""
    while len(content) < size:
        if sock.type == _socket.SOCK_SEQPACKET:
            raise violation(sender, f"expected {size} bytes and more, got {len(content)}")
        more = sock.recv(MAX_PACKET_BYTES)
        if not more:
            raise ConnectionResetError("left in the middle of a message")
        content += more
    return content


def send_arrays(
    sock: _socket.socket,
    kind: int,
    arrays: Mapping[str, NDArray[Any]],
    shared: Window | None = None,
    **fields: int,
) -> None:
    """Sends arrays of numbers by name.

    Args:
        sock: Connection to the other side.
        kind: `RUN` or `DONE`.
        arrays: Arrays by name, of any shape and of types that ONNX knows but strings.
        shared: Memory that large ones are written into; None if they travel.
        fields: `deadline_ns`, `number` and `model`, as in `Packet`.

    Raises:
        NoRoomError: They are too many or too large.
        OSError: The other side left or does not read, or there is no memory.
    """
    text, places = _encode_text(tuple([(name, one.dtype, one.shape) for name, one in arrays.items()]))
    is_small = len(text) <= MAX_TEXT_BYTES and places.end <= MAX_ARRAYS_BYTES
    if not is_small or not all(_can_travel(one.dtype, one.shape) for one in arrays.values()):
        from ortprep.errors import NoRoomError

        shapes = ", ".join([f"{name} {list(one.shape)}" for name, one in arrays.items()])[:500]
        raise NoRoomError(f"arrays of {places.end} bytes do not fit a message: {shapes}")
    data, large = b"", []
    if places.is_inline:
        data = b"".join([_to_native(one).tobytes() for one in arrays.values()])
    elif shared is not None:
        shared.write(arrays.values(), places)
    else:
        large = [_to_native(one).reshape(-1).view(np.uint8).data for one in arrays.values()]
    send(sock, kind, text, arrays=len(arrays), data=data, **fields)
    for content in large:
        sock.sendall(content, _socket.MSG_NOSIGNAL)


def _to_native(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array in C order and native byte order."""
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


@functools.lru_cache(_MAX_CACHED)
def _encode_text(specs: tuple[tuple[str, np.dtype[Any], Shape], ...]) -> tuple[bytes, Places]:
    """Returns name, type and shape of arrays as bytes, and where the arrays lie."""
    texts, sizes = [], []
    for name, dtype, shape in specs:
        title, kind = name.encode(), _name_of(dtype).encode()
        head = _NAMES.pack(len(title), len(kind)) + title + kind
        texts.append(head + struct.pack(f"<B{len(shape)}Q", len(shape), *shape))
        sizes.append(math.prod(shape) * dtype.itemsize)
    return b"".join(texts), place_arrays(sizes)


def can_send(name: Any, dtype: np.dtype[Any]) -> bool:
    """Returns whether an array of this name and type can be in a message, if it is not too large."""
    try:
        is_name = len(name.encode()) < MAX_TEXT_BYTES
    except (AttributeError, UnicodeEncodeError):  # no text, or one that came from bytes
        return False
    kind = _name_of(dtype)
    return is_name and (kind in _NUMBERS or (kind == _BFLOAT16 and dtype.itemsize == 2))


def _name_of(dtype: np.dtype[Any]) -> str:
    """Returns a type's name; bfloat16 is a type of `ml_dtypes`, or a record of this package."""
    return dtype.names[0] if dtype.names else dtype.name


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
    sock: _socket.socket,
    specs: Mapping[str, tuple[np.dtype[Any], Shape]],
    places: Places,
    rest: memoryview,
    shared: Window | None,
) -> tuple[dict[str, NDArray[Any]], memoryview]:
    """Returns the arrays of a message by name, and what has come behind it.

    Args:
        sock: Where what is missing comes from.
        specs: Type and shape of each, as `_decode_text` returns them.
        places: Where they lie in shared memory, if they do.
        rest: What has come behind the text.
        shared: As `receive` has it.

    Raises:
        ValueError: They are too large, or cut short, or a boolean is neither 0 nor 1.
        MemoryError: There is no memory for them.
        OSError: As `receive`.
    """
    if places.end > MAX_ARRAYS_BYTES:
        raise ValueError(f"arrays of {places.end} bytes")
    arrays = {}
    for (name, (dtype, shape)), offset in zip(specs.items(), places.offsets, strict=True):
        if shared is not None and not places.is_inline:
            array = shared.read(dtype, shape, offset)
        else:
            array = np.empty(shape, dtype)
            rest = _fill(sock, array.reshape(-1).view(np.uint8).data, rest)
        arrays[name] = array
        # As `is_valid_bool`, whose module no client needs to import.
        if dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise ValueError("expected 0 or 1 for a boolean")
    return arrays, rest


def _fill(sock: _socket.socket, target: memoryview, rest: memoryview) -> memoryview:
    """Fills memory with what has come, and then with what comes; returns what has come beyond that."""
    count = min(len(target), len(rest))
    target[:count], rest, target = rest[:count], rest[count:], target[count:]
    if target and sock.type == _socket.SOCK_SEQPACKET:
        raise ValueError(f"{len(target)} bytes are missing")
    while target:
        got = sock.recv_into(target)
        if not got:
            raise ConnectionResetError("left in the middle of a message")
        target = target[got:]
    return rest


def _find_dtype(name: str) -> np.dtype[Any]:
    """Returns the type of a name; raises `ValueError` unless it is one of numbers."""
    if name in _NUMBERS:
        return np.dtype(name)
    if name != _BFLOAT16:
        raise ValueError(f"{name[:40]!r} is no type of numbers")
    from ortprep.runtime.tensors.element_types import BFLOAT16

    return BFLOAT16
