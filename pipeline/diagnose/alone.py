"""Measuring alone on a device, and saying so while that has to wait."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from pipeline.measuring.device_lock import measuring

log = logging.getLogger(__name__)


def alone_on(device: str) -> AbstractContextManager[None]:
    """Holds a device exclusively; warns once if it is not free at once.

    Args:
        device: `cpu` or `cuda:<index>`.

    Raises:
        StageError: The folder of the lock cannot be trusted.
    """
    return measuring(device, on_wait=lambda: log.warning("waiting until other work on %s is over", device))
