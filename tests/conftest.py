"""What holds for every test."""

from __future__ import annotations

import importlib.util
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is under nohup and in background jobs; commands under test would ignore Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("hypothesis") is not None:  # the runtime's tests go without it
    from hypothesis import HealthCheck, settings

    # How long an example takes tells how busy the machine is, and nothing of what is tested.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
