"""What holds for every test."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is under nohup and in background jobs; commands under test would ignore Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("hypothesis") is not None:  # the runtime's tests go without it
    from hypothesis import HealthCheck, settings

    # How long an example takes tells how busy the machine is, and nothing of what is tested.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

ROOT = Path(__file__).parent
LOOK_AT_THE_MACHINE = (
    "runtime/pool",
    "pool",
    "cluster",
    "diagnose",
    "cli/test_doctor_command.py",
    "cli/test_pool_commands.py",
)
"""Tests that count what others' tests of their kind leave running, or time what those would disturb."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup`, has a file's tests share a process and its fixtures; and those above."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        place = item.path.relative_to(ROOT).as_posix()
        looks = place.startswith(LOOK_AT_THE_MACHINE)
        item.add_marker(pytest.mark.xdist_group("the machine" if looks else place))
