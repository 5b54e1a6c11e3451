"""What holds for every test."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("hypothesis") is not None:  # the runtime's tests go without it
    from hypothesis import HealthCheck, settings

    # How long an example takes tells how busy the machine is, and nothing of what is tested.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
