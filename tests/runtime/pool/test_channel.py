"""Packets to a worker: whole, in order, and none after the end."""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.errors import NoRoomError, PoolError
from ortprep.runtime.ipc import INLINE_BYTES, MAX_PACKET_BYTES, MemoryFile, encode_shape
from ortprep.runtime.pool import packet_channel
from ortprep.runtime.pool.memory import PAGE_BYTES, Region, RegionTable
from ortprep.runtime.pool.messages import (
    HEAD_BYTES,
    Head,
    LayoutReader,
    MessageKind,
    decode_head,
    decode_json,
    encode,
    encode_answer,
    encode_body,
    encode_head,
    lay_out,
)
from ortprep.runtime.pool.packet_channel import PacketChannel
from ortprep.runtime.pool.worker_main import PoolConnection, serve
from tests.fakes import lingering, wait_for


@pytest.fixture
def ends():
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, its:
        yield PacketChannel(mine), its


def test_what_there_is_no_room_for_goes_later_and_in_order(ends):
    channel, worker = ends
    packets = [n.to_bytes(4, "big") * 5000 for n in range(100)]
    for packet in packets:
        channel.put(packet)
    assert not channel.flush()
    got: list[bytes] = []
    while len(got) < len(packets):
        got.append(worker.recv(2**17))
        channel.flush()
    assert got == packets
    assert channel.flush()


def test_however_many_threads_send_the_order_is_that_of_putting_down(ends):
    channel, worker = ends
    lock, count = threading.Lock(), [0]
    got: list[int] = []

    def send() -> None:
        for _ in range(3000):
            with lock:
                channel.put(count[0].to_bytes(4, "big"))
                count[0] += 1
            while not channel.flush():
                pass

    def read() -> None:
        while packet := worker.recv(100):
            got.append(int.from_bytes(packet, "big"))

    reader = threading.Thread(target=read)
    reader.start()
    senders = [threading.Thread(target=send) for _ in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert channel.flush()
    channel.close()
    reader.join()
    assert got == list(range(12_000))


class TornSocket:
    """A socket that sends a packet, and whose sender a signal breaks off then."""

    def __init__(self, own: socket.socket) -> None:
        self._own = own

    def send(self, packet: bytes) -> int:
        self._own.send(packet)
        raise KeyboardInterrupt


class CountingModel:
    """A model that answers with how many requests it has had."""

    def __init__(self) -> None:
        self.count = 0

    def answer(self, head: Head, *_: object) -> bytes:
        self.count += 1
        return f"{head.number} is {self.count}".encode()


def test_a_packet_whose_sender_a_signal_broke_off_is_answered_once(ends):
    channel, worker = ends
    whole, channel._socket = channel._socket, cast("Any", TornSocket(channel._socket))
    for number in (1, 2):
        channel.put(encode_head(MessageKind.RUN, number))
    with pytest.raises(KeyboardInterrupt):
        channel.flush()
    channel._socket = whole
    assert channel.flush()
    channel.put(encode_head(MessageKind.STOP))
    assert channel.flush()
    connection = PoolConnection(os.dup(worker.fileno()))
    serve(connection, cast("Any", {0: CountingModel()}), cast("Any", None))
    connection.close()
    assert bytes(channel.receive() or b"") == b"1 is 1"
    assert bytes(channel.receive() or b"") == b"2 is 2"
    assert channel.receive() is None


def test_after_close_nothing_is_sent_and_nothing_raises(ends):
    channel, worker = ends
    channel.close()
    channel.put(b"late")
    assert channel.flush()
    assert worker.recv(100) == b""


def test_what_a_worker_sent_before_it_ended_is_read_although_it_left_packets_unread(ends):
    channel, worker = ends
    for n in range(5):
        channel.put(b"request")
        worker.send(b"answer %d" % n)
    assert channel.flush()
    worker.close()
    got = [bytes(channel.receive() or b"") for _ in range(6)]
    assert got == [b"answer %d" % n for n in range(5)] + [b""]
    channel.put(b"one more")
    assert channel.flush()


def test_a_template_that_once_was_late_is_not_waited_for_again(ends, monkeypatch):
    channel, template = ends
    monkeypatch.setattr(packet_channel, "_ASK_TIMEOUT_S", 0.05)
    with pytest.raises(ConnectionError, match="nothing came"):
        channel.ask(encode_head(MessageKind.REAP, 7), (), MessageKind.REAPED)
    template.send(encode_head(MessageKind.REAPED, 7))
    monkeypatch.setattr(packet_channel, "_ASK_TIMEOUT_S", 1000.0)
    for _ in range(2):  # the late answer is taken for no other's
        with pytest.raises(ConnectionError, match="did not answer before"):
            channel.ask(encode_head(MessageKind.FORK), (), MessageKind.FORKED)


def test_how_another_process_ended_is_no_answer(ends):
    channel, template = ends
    template.send(encode_head(MessageKind.REAPED, 8))
    with pytest.raises(ConnectionError, match="8 instead of 7"):
        channel.ask(encode_head(MessageKind.REAP, 7), (), MessageKind.REAPED)


STOPPED, CONTINUED = 0x137F, 0xFFFF


@pytest.mark.attack
@pytest.mark.parametrize(
    ("kind", "number", "figure"),
    [
        (MessageKind.FORKED, 2**63, 0),
        (MessageKind.FORKED, 0, 2**40),
        *((MessageKind.REAPED, 7, status) for status in (2**63, 2**16, STOPPED, CONTINUED)),
    ],
)
def test_numbers_that_no_process_has_are_no_answer(ends, kind, number, figure):
    channel, template = ends
    template.send(encode_head(kind, number, figure=figure))
    question = encode_head(MessageKind.REAP, 7) if number == 7 else encode_head(MessageKind.FORK)
    with pytest.raises(ConnectionError, match="impossible numbers"):
        channel.ask(question, (), kind)
    with pytest.raises(ConnectionError, match="did not answer before"):
        channel.ask(question, (), kind)


def test_an_empty_packet_is_no_end(ends):
    channel, worker = ends
    worker.send(b"answer")
    worker.send(b"")
    assert bytes(channel.receive() or b"") == b"answer"
    with pytest.raises(PoolError, match="got an empty packet"):
        channel.receive()
    assert channel.receive() is None
    worker.close()
    end = channel.receive()
    assert end is not None
    assert not end


def test_a_packet_larger_than_any_is_cut(ends):
    channel, worker = ends
    worker.send(b"x" * 150_000)
    packet = channel.receive()
    assert packet is not None
    assert len(packet) == 96 * 1024
    assert channel.receive() is None


def within(seconds: float, call: Callable[[], object]) -> BaseException | None:
    """Returns what a call raises; fails if it takes longer, as it may for ever."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller says
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()
    return raised[0] if raised else None


def open_files() -> set[str]:
    """What the descriptors of this process are of; other tests' threads may close some meanwhile."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(descriptor.readlink()))
    return found


@pytest.mark.attack
@pytest.mark.parametrize("count", [1, 100])
def test_descriptors_that_linger_stop_neither_receive_nor_close(ends, count):
    channel, worker = ends
    with lingering(count + 1) as descriptors:
        sockets = {f"socket:[{os.fstat(descriptor).st_ino}]" for descriptor in descriptors}
        for sent in (descriptors[1:], descriptors[:1]):
            socket.send_fds(worker, [b"answer"], sent)
        for descriptor in descriptors:
            os.close(descriptor)  # those on their way are the last
        error = within(10, channel.receive)
        assert isinstance(error, PoolError)
        assert "with descriptors" in str(error)
        assert within(10, channel.close) is None
    wait_for(lambda: not sockets & open_files(), what="no descriptor is left")


# -- regions of shared memory, and the messages that say what lies in them

MB = 2**20
_BYTE = np.dtype(np.uint8)


def resident(file: MemoryFile) -> int:
    """Bytes of a file that take memory."""
    text = Path("/proc/self/smaps").read_text()
    part = text[text.index(f"{np.frombuffer(file.memory, _BYTE).ctypes.data:x}-") :]
    return int(part[part.index("Rss:") :].split()[1]) * 1024


def test_more_than_a_file_can_have_is_an_error_of_the_pool():
    with pytest.raises(PoolError, match="cannot make"):
        RegionTable(2**40, 2**36)


@pytest.mark.attack
def test_a_size_that_was_sealed_cannot_be_changed():
    file = MemoryFile(4 * PAGE_BYTES)
    descriptor = file.descriptor
    for size in (0, PAGE_BYTES, 8 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@given(st.lists(st.tuples(st.sampled_from(["take", "answer", "end"]), st.integers(1, 3 * MB)), max_size=60))
def test_no_two_hold_the_same_region_and_answers_to_small_requests_always_have_one(steps):
    table = RegionTable(4, 8 * MB)
    held: list[Region] = []
    for step, size in steps:
        if step == "take" and table.has_room(size):
            held.append(table.take(size))
            np.ndarray((size,), _BYTE, table.file.memory, held[-1].begin)[...] = len(held)
        elif step == "answer" and sum(region.is_for_answer for region in held) < 4:
            held.append(table.take(0))
            np.ndarray((size,), _BYTE, table.file.memory, held[-1].begin)[...] = len(held)
            table.note_written(held[-1], size)
        elif step == "end" and held:
            table.release(held.pop(size % len(held)))
        begins = [region.begin for region in held]
        assert len(set(begins)) == len(begins)
        assert table.used_bytes <= 8 * MB
        assert table.held_bytes <= max(8 * MB, sum(region.kept for region in held))
        assert resident(table.file) <= table.held_bytes
    table.close()


def test_requests_wait_for_bytes_and_too_large_ones_are_refused():
    table = RegionTable(4, 8 * MB)
    first = table.take(5 * MB)
    assert table.has_room(3 * MB)
    assert not table.has_room(3 * MB + 1)
    table.release(first)
    assert table.has_room(8 * MB)
    with pytest.raises(NoRoomError, match="does not fit"):
        table.require_room(8 * MB + 1)
    table.close()


def test_pages_are_kept_for_the_next_slot_up_to_the_limit():
    table = RegionTable(4, 8 * MB)
    regions = [table.take(3 * MB), table.take(3 * MB), table.take(0)]
    table.note_written(regions[2], 6 * MB)
    for region in regions:
        np.ndarray((region.kept,), _BYTE, table.file.memory, region.begin)[...] = 1
    for region in regions:
        table.release(region)
    assert resident(table.file) == table.held_bytes == 6 * MB
    assert table.take(MB) is regions[2]
    table.close()


_SHAPES = st.lists(st.lists(st.integers(0, 64), max_size=5).map(tuple), min_size=1, max_size=5).map(tuple)
_ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


def packet_of(layout, itemsize):
    arrays = [np.zeros(shape, f"V{itemsize}") for shape in layout.shapes] if not layout.slot_bytes else ()
    fields = {"model": 3, "begin": 4096, "size": 5, "figure": 6}
    head = encode_head(MessageKind.DONE, 7, text_bytes=len(layout.text), **fields)
    return memoryview(bytearray(head + encode_body(layout, arrays)))


@given(_SHAPES, _ITEMSIZES)
def test_tensors_are_laid_out_one_after_the_other_and_read_as_they_were_written(shapes, itemsize):
    itemsizes = (itemsize,) * len(shapes)
    layout = lay_out(shapes, itemsizes)
    packet = packet_of(layout, itemsize)
    head = decode_head(packet, "test")
    assert head == Head(MessageKind.DONE, 3, len(layout.text), 7, 4096, 5, 6)
    reader = LayoutReader(itemsizes, "test")
    assert reader.read(packet, head, layout.slot_bytes) == layout
    assert reader.read(packet, head, layout.slot_bytes) is reader.read(packet, head, 2**40)
    end = HEAD_BYTES + len(layout.text) if not layout.slot_bytes else 0
    for shape, offset in zip(shapes, layout.offsets, strict=True):
        assert offset >= end
        assert offset % 64 == 0
        end = offset + math.prod(shape) * itemsize
    assert end <= layout.end <= (layout.slot_bytes or len(packet))
    assert layout.slot_bytes == 0 or layout.slot_bytes > INLINE_BYTES - 64 * len(shapes)
    assert len(packet) <= MAX_PACKET_BYTES


@given(_SHAPES, _ITEMSIZES, st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_places_that_lie_inside(shapes, itemsize, at, value):
    layout = lay_out(shapes, (itemsize,) * len(shapes))
    packet = packet_of(layout, itemsize)
    packet[at % (HEAD_BYTES + len(layout.text))] = value
    try:
        head = decode_head(packet, "test")
        got = LayoutReader([itemsize] * len(shapes), "test").read(packet, head, layout.slot_bytes)
    except PoolError:
        return
    for shape, offset in zip(got.shapes, got.offsets, strict=True):
        limit = layout.slot_bytes if got.slot_bytes else len(packet)
        assert offset + math.prod(shape) * itemsize <= limit


@given(st.binary(max_size=200))
def test_garbage_is_a_pool_error_and_nothing_else(data):
    packet = memoryview(data)
    with suppress(PoolError):
        head = decode_head(packet, "test")
        assert len(LayoutReader([4], "test").read(packet, head, 0).shapes) == 1
    with suppress(PoolError):
        assert isinstance(decode_json(packet, "test"), dict)


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (0, 2**63), (2**40, 2**40), (1,) * 33])
def test_a_shape_that_no_array_can_have_is_a_pool_error(shape):
    text = encode_shape(shape)
    packet = memoryview(encode_head(MessageKind.DONE, 7, text_bytes=len(text)) + text)
    with pytest.raises(PoolError, match="impossible"):
        LayoutReader([4], "test").read(packet, decode_head(packet, "test"), 2**60)


@pytest.mark.attack
def test_outputs_that_do_not_fit_together_or_hide_bytes_are_refused():
    reader = LayoutReader([4] * 50, "answer of m")
    layout = lay_out(((2**18,),) * 50, (4,) * 50)
    packet = memoryview(encode_answer(1, layout))
    head = decode_head(packet, "test")
    with pytest.raises(PoolError, match="outside of its memory"):
        reader.read(packet, head, 2**20)
    hiding = memoryview(bytes(packet) + bytes(1000))
    with pytest.raises(PoolError, match="1000 bytes too many"):
        reader.read(hiding, head._replace(text_bytes=len(layout.text) + 1000), 2**26)


def test_tensors_that_are_too_many_for_a_packet_are_an_error():
    with pytest.raises(PoolError, match="too many tensors"):
        lay_out(((1,),) * 10_000, (4,) * 10_000)


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b"[" * 10_000])
def test_what_is_no_object_is_a_pool_error(text):
    packet = memoryview(encode_head(MessageKind.FAILED) + text)
    with pytest.raises(PoolError, match="unreadable message"):
        decode_json(packet, "test")


def test_a_text_that_is_too_long_is_cut():
    content = {"kind": "RunError", "message": "ä" * 10**6, "hint": None}
    packet = memoryview(encode(MessageKind.FAILED, 9, content))
    assert len(packet) <= MAX_PACKET_BYTES
    got = decode_json(packet, "test")
    assert got["kind"] == "RunError"
    assert got["message"].startswith("ää")
    assert json.loads(json.dumps(got)) == got
