"""What is sent arrives as it was, and whatever comes instead is an error that says so."""

import _socket
import math
import os
import socket
import threading
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.errors import HostError, NoRoomError
from ortprep.runtime.packets import (
    DONE,
    FAILED,
    INLINE_BYTES,
    MAX_PACKET_BYTES,
    MAX_RANK,
    Packet,
    place_arrays,
    read_json,
    receive,
    send,
    send_arrays,
    send_json,
)
from ortprep.runtime.pool.memory import WorkerMemory
from ortprep.runtime.tensors.element_types import BFLOAT16

_DTYPES = [*map(np.dtype, "?bBhHiIqQefdFD"), BFLOAT16]
_SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=4).map(tuple), min_size=1, max_size=5)


def connect(kind=socket.SOCK_SEQPACKET):
    mine, its = socket.socketpair(socket.AF_UNIX, kind)
    return _socket.socket(fileno=mine.detach()), _socket.socket(fileno=its.detach())


def arrays_of(shapes, dtype):
    return {
        f"x{number}": np.zeros(math.prod(shape) * dtype.itemsize, np.uint8).view(dtype).reshape(shape)
        for number, shape in enumerate(shapes)
    }


def memory():
    descriptor = WorkerMemory.create()
    try:
        return WorkerMemory(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("way", ["stream", "window"])
@given(shapes=_SHAPES, dtype=st.sampled_from(_DTYPES), fill=st.integers(0, 1))
def test_arrays_arrive_as_they_were_sent(way, shapes, dtype, fill):
    arrays = arrays_of(shapes, dtype)
    for array in arrays.values():
        array.reshape(-1).view(np.uint8)[...] = fill
    here, there = connect(socket.SOCK_SEQPACKET if way == "window" else socket.SOCK_STREAM)
    window = memory().answers(1) if way == "window" else None
    sender = threading.Thread(target=lambda: send_arrays(here, DONE, arrays, window, number=7, model=3))
    sender.start()
    packet = receive(there, "test", window)
    sender.join()
    assert packet[:4] == (DONE, 0, 7, 3)
    assert list(packet.arrays) == list(arrays)
    for name, array in arrays.items():
        assert packet.arrays[name].dtype == dtype
        assert packet.arrays[name].shape == array.shape
        assert packet.arrays[name].tobytes() == array.tobytes()
    here.close()
    there.close()


@given(st.lists(st.integers(0, 10**6), max_size=20))
def test_arrays_lie_one_after_the_other_on_multiples_of_64(sizes):
    places, end = place_arrays(sizes), 0
    for size, offset in zip(sizes, places.offsets, strict=True):
        assert offset >= end
        assert offset % 64 == 0
        end = offset + size
    assert end <= places.end < end + 64
    assert places.is_inline == (places.end <= INLINE_BYTES)


def answer_to(packet, window=None, kind=socket.SOCK_SEQPACKET):
    """Returns what is read from bytes that were sent, and nothing after them."""
    here, there = connect(kind)
    try:
        here.send(packet)
        here.shutdown(socket.SHUT_WR)
        return receive(there, "test", window)
    finally:
        here.close()
        there.close()


def packet_of(shapes):
    """Returns a packet with arrays as bytes; those of more than 16 KiB lie in a window."""
    here, there = connect()
    shared = memory()
    send_arrays(here, DONE, arrays_of(shapes, np.dtype(np.float32)), shared.answers(0))
    content = bytearray(there.recv(MAX_PACKET_BYTES))
    here.close()
    there.close()
    return content


@pytest.mark.attack
@given(_SHAPES, st.integers(0, 10_000), st.integers(0, 255), st.booleans())
def test_a_changed_byte_is_an_error_or_arrays_that_lie_inside(shapes, at, value, is_stream):
    packet, shared = packet_of(shapes), memory()
    packet[at % len(packet)] = value
    way = (None, socket.SOCK_STREAM) if is_stream else (shared.answers(0), socket.SOCK_SEQPACKET)
    with suppress(HostError, MemoryError, ConnectionResetError):
        got = answer_to(bytes(packet), *way)
        assert all(array.nbytes < 2**32 for array in got.arrays.values())


@pytest.mark.attack
@given(st.binary(min_size=1, max_size=300))
def test_garbage_is_an_error_of_the_protocol_and_nothing_else(data):
    with pytest.raises(HostError, match="broke the protocol"):
        answer_to(data)
    with pytest.raises((HostError, ConnectionResetError), match=r"broke the protocol|left in the middle"):
        answer_to(data, kind=socket.SOCK_STREAM)


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b"[" * 10_000])
def test_what_is_no_object_is_an_error_of_the_protocol(text):
    with pytest.raises(HostError, match="broke the protocol"):
        read_json(Packet(FAILED, 0, 0, 0, text, {}), "test")


def test_a_text_that_is_too_long_is_cut():
    here, there = connect()
    send_json(here, FAILED, {"kind": "RunError", "message": "ä" * 10**6, "hint": None}, number=9)
    got = read_json(receive(there, "test"), "test")
    assert got["kind"] == "RunError"
    assert got["message"].startswith("ää")
    with pytest.raises(NoRoomError, match="do not fit a message"):
        send_arrays(here, DONE, arrays_of([(1,)] * 10_000, np.dtype(np.float32)))
    for shape in ((1,) * (MAX_RANK + 1), (0, 2**62)):  # a request may decide what shape its answer has
        with pytest.raises(NoRoomError, match="do not fit a message"):
            send_arrays(here, DONE, {"y": np.empty(shape, np.uint8)})
    send(here, FAILED, b"{}")
    here.close()
    there.close()


@pytest.mark.attack
def test_memory_of_a_worker_cannot_shrink():
    descriptor = WorkerMemory.create()
    shared = WorkerMemory(descriptor)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
    shared.close()
