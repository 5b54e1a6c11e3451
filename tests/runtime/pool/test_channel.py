"""Packets to a worker: whole, in order, and none after the end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from ortprep.errors import PoolError
from ortprep.runtime.pool import packet_channel
from ortprep.runtime.pool.messages import Head, MessageKind, encode_head
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


@pytest.mark.attack
@pytest.mark.parametrize("count", [1, 100])
def test_descriptors_that_linger_stop_neither_receive_nor_close(ends, count):
    channel, worker = ends
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are not looked at
    with lingering(count + 1) as descriptors:
        for sent in (descriptors[1:], descriptors[:1]):
            socket.send_fds(worker, [b"answer"], sent)
        for descriptor in descriptors:
            os.close(descriptor)  # those on their way are the last
        error = within(10, channel.receive)
        assert isinstance(error, PoolError)
        assert "with descriptors" in str(error)
        assert within(10, channel.close) is None
    wait_for(
        lambda: len(os.listdir("/proc/self/fd")) == opened - 1,  # noqa: PTH208 - names are not looked at
        what="no descriptor is left",
    )
