"""Trials of plans that crash, hang or take all memory, in the place of `pipeline.tuning.trial`'s own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from pipeline.tuning.trial import measure_and_check

Request = Mapping[str, Any]


def crash(request: Request) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def crash_after_measuring(request: Request) -> dict[str, Any]:
    measure_and_check(request)
    return crash(request)


def hang(request: Request) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return {}


def take_all_memory(request: Request) -> dict[str, Any]:
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1)) * 2**26)
