"""What is to be written to a worker's pipe: put down with the pool's lock held, written without.

Writing lets other Python threads run; one that then wants the pool's lock would be put to sleep, and woken,
for every request.
"""

from __future__ import annotations

import os
import threading


class Outbox:
    """Frames on their way into a pipe, in the order in which they were put down.

    Args:
        descriptor: The pipe's end, which does not block.

    Attributes:
        is_torn: Whether frames may have been lost, so that the worker has to be replaced.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._frames = bytearray()
        self._writing = threading.Lock()
        self._is_closed = False
        self.is_torn = False

    def add(self, data: bytes) -> None:
        """Puts frames down; the caller holds the pool's lock, which makes the order."""
        self._frames += data

    def flush(self) -> bool:
        """Writes what there is room for, unless another thread is at it, and says whether that was all.

        What is put down while another thread writes, that thread writes.
        """
        while self._frames:
            if not self._writing.acquire(blocking=False):
                return True
            try:
                if not self._write():
                    return False
            finally:
                self._writing.release()
        return True

    def _write(self) -> bool:
        data = bytes(self._frames)
        # Taken out before they are written: broken off by a signal, frames are lost, which shows, and never
        # written twice, which would have a worker write to memory that is somebody else's by then.
        del self._frames[: len(data)]
        try:
            written = len(data) if self._is_closed else os.write(self.descriptor, data)
        except BlockingIOError:
            written = 0
        except OSError:
            written = len(data)  # nobody reads any more, which is noticed elsewhere
        except BaseException:
            self.is_torn = True
            raise
        self._frames[:0] = data[written:]
        return written > 0

    def close(self) -> None:
        """Writes nothing more; only then may the pipe be closed."""
        with self._writing:
            self._is_closed = True
