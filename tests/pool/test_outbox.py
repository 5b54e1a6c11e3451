from __future__ import annotations

import os
import threading

from pipeline.runtime.pool.outbox import Outbox


def test_what_there_is_no_room_for_goes_later_and_in_order() -> None:
    out, in_ = os.pipe()
    os.set_blocking(in_, False)
    box = Outbox(in_)
    text = b"".join(n.to_bytes(4, "big") for n in range(60_000))
    box.add(text)
    assert not box.flush()
    got = os.read(out, 2**20)
    while not box.flush():
        got += os.read(out, 2**20)
    got += os.read(out, 2**20)
    assert got == text
    os.close(in_)
    os.close(out)


def test_however_many_threads_write_the_order_is_that_of_adding() -> None:
    out, in_ = os.pipe()
    os.set_blocking(in_, False)
    box, lock, count, got = Outbox(in_), threading.Lock(), [0], bytearray()

    def write() -> None:
        for _ in range(3000):
            with lock:
                box.add(count[0].to_bytes(4, "big"))
                count[0] += 1
            while not box.flush():
                pass

    def read() -> None:
        while data := os.read(out, 2**16):
            got.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert box.flush()
    os.close(in_)
    reader.join()
    os.close(out)
    assert bytes(got) == b"".join(n.to_bytes(4, "big") for n in range(12_000))


def test_after_close_nothing_is_written() -> None:
    out, in_ = os.pipe()
    os.set_blocking(in_, False)
    box = Outbox(in_)
    box.close()
    box.add(b"late")
    assert box.flush()
    os.close(in_)
    assert os.read(out, 100) == b""
    os.close(out)
