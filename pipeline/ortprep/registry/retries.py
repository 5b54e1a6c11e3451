"""Retries of requests to a registry that is unavailable for a moment."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from ortprep.errors import RegistryUnavailableError
from ortprep.time_limit import check_time, remaining_s

T = TypeVar("T")

log = logging.getLogger(__name__)

ATTEMPTS = 4
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 30.0


def with_retries(
    action: Callable[[], T], *, attempts: int = ATTEMPTS, pause: Callable[[float], object] = time.sleep
) -> T:
    """Returns what `action` returns, and repeats it while it raises RegistryUnavailableError.

    Raises:
        Exception: What `check_time` raises, once the time of all requests together is over.
    """
    for failures in range(1, attempts + 1):
        check_time()
        try:
            return action()
        except RegistryUnavailableError as error:
            if failures == attempts:
                raise
            wait_to_retry(error, failures, pause=pause)
    raise AssertionError("unreachable")


def wait_to_retry(
    error: RegistryUnavailableError, failures: int, *, pause: Callable[[float], object] = time.sleep
) -> None:
    """Waits after so many failures in a row.

    Pauses double, with jitter, so that a thousand jobs that were refused at once do not come back at once. If
    the registry says how long to wait, that counts, up to `MAX_PAUSE_S`. Raises what `check_time` does.
    """
    check_time()
    wait_s = FIRST_PAUSE_S * 2 ** (failures - 1) * random.uniform(0.5, 1.5)
    wait_s = min(max(wait_s, error.retry_after_s), MAX_PAUSE_S)
    log.info("trying again in %.1f s: %s", wait_s, error.message)
    pause(min(wait_s, remaining_s()))
