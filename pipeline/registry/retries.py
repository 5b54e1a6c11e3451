"""Asking again: a registry that is overloaded or far away fails now and then."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from pipeline.errors import RegistryUnavailableError

T = TypeVar("T")

log = logging.getLogger(__name__)

ATTEMPTS = 4
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0


def with_retries(
    action: Callable[[], T], *, attempts: int = ATTEMPTS, pause: Callable[[float], object] = time.sleep
) -> T:
    """Returns what `action` returns, asking again while the registry is unavailable.

    Pauses double from a quarter of a second on, with jitter, so that a thousand jobs that were refused at
    once do not come back at once; a registry that says how long to wait is believed, up to half a minute.

    Args:
        action: May be called several times.
        attempts: How often, at most.
        pause: Waits for a number of seconds.

    Raises:
        RegistryUnavailableError: It failed as often; the last error.
    """
    for attempt in range(1, attempts + 1):
        try:
            return action()
        except RegistryUnavailableError as error:
            if attempt == attempts:
                raise
            wait_s = FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
            wait_s = min(max(wait_s, error.retry_after_s), LONGEST_PAUSE_S)
            log.info("trying again in %.1f s: %s", wait_s, error.message)
            pause(wait_s)
    raise AssertionError("unreachable")
