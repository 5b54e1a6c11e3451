"""Between those who rely on what is in a registry and those who remove what nobody needs.

Both first write that they are there and then look. So either the collection sees the reservation, and
spares what it is for, or the other sees the collection, and waits: whichever wrote first, the other one's
look comes after it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator

from pipeline.errors import ConflictError, RegistryError
from pipeline.registry.catalogue import Catalogue
from pipeline.registry.records import CollectionRecord, RecordName, ReservationRecord

log = logging.getLogger(__name__)

RESERVATION_S = 24 * 3600.0
"""Seconds after which whoever reserved something is taken for dead; clocks may differ by much less."""

COLLECTION_S = 300.0
"""Seconds that a collection is waited for. It begins no removal in the second half of them."""

_SURELY_DEAD_S = 24 * 3600.0


@contextlib.contextmanager
def reserve(
    catalogue: Catalogue, model: str, *, source: str, spec: str, files: tuple[str, ...] = ()
) -> Iterator[None]:
    """Keeps collections away from one source and spec, and from these files, while the block runs.

    Raises:
        RegistryError: The registry failed.
    """
    record = ReservationRecord(source, spec, files, time.time() + RESERVATION_S, os.urandom(8).hex())
    name = catalogue.write_record(model, record)
    try:
        _wait_for_collections(catalogue, model)
        yield
    finally:
        try:
            catalogue.delete_record(model, name)
        except RegistryError as error:
            # It expires by itself; what went wrong before, or nothing, is what counts.
            log.info("a reservation of %s stays until it expires: %s", model, error.message)


def _wait_for_collections(catalogue: Catalogue, model: str) -> None:
    """Returns once every collection that may not have seen us is over, or has been long enough to be dead.

    How long is measured here: clocks of two machines need not agree.
    """
    first_seen_s: dict[RecordName, float] = {}
    pause_s = 0.1
    while True:
        now_s = time.monotonic()
        running = {
            name
            for name, record in catalogue.read_records(model, only="collection").items()
            if isinstance(record, CollectionRecord) and time.time() - record.begun_at < _SURELY_DEAD_S
        }
        for name in running:
            first_seen_s.setdefault(name, now_s)
        if all(now_s - first_seen_s[name] > COLLECTION_S for name in running):
            return
        if pause_s < 0.2:
            log.warning("waiting for a collection of %s to end; for %.0f s at most", model, COLLECTION_S)
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 5.0)


@contextlib.contextmanager
def collecting(catalogue: Catalogue, model: str) -> Iterator[Callable[[], None]]:
    """Makes newcomers wait while the block runs, and yields what has to be called before each removal.

    That raises ConflictError in time before they stop waiting.

    Raises:
        RegistryError: The registry failed, or does not let anything be removed.
    """
    # Where nothing can be removed, this must not stay and be waited for.
    catalogue.delete_record(model, catalogue.write_record(model, CollectionRecord(0.0, os.urandom(8).hex())))
    name = catalogue.write_record(model, CollectionRecord(time.time(), os.urandom(8).hex()))
    begun_s = time.monotonic()

    def check_time() -> None:
        if time.monotonic() - begun_s > COLLECTION_S / 2:
            raise ConflictError(
                f"collecting {model} takes too long\n  expected to be done before publishers stop waiting",
                hint="run it again: what was removed is removed",
            )

    try:
        yield check_time
    finally:
        catalogue.delete_record(model, name)
