"""What holds for every test."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ortprep.telemetry import disable_telemetry

if TYPE_CHECKING:
    from tests.prepare.builders import Outcome, Project

disable_telemetry()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is under nohup and in background jobs; commands under test would ignore Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_HYPOTHESIS = importlib.util.find_spec("hypothesis") is not None
"""False where only what a runtime job needs is installed."""

if HAS_HYPOTHESIS:
    from hypothesis import HealthCheck, settings

    # The same examples in every run, whatever they take: a failure is one of the change that is tested.
    # `--hypothesis-profile=default` draws others.
    settings.register_profile(
        "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("repeatable")

ROOT = Path(__file__).parent
SCOPES = {
    "the machine": ("runtime/pool", "diagnose", "cli/test_doctor_command.py", "cli/test_pool_commands.py"),
    "a cluster": ("cluster",),
    "registries": ("registry",),
}
"""Tests that share servers, or that count or time what others of their kind would disturb."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Where only what a runtime job needs is installed, passes over the tests that need more."""
    if HAS_HYPOTHESIS or not collection_path.match("test_*.py"):
        return None
    return "pytest.mark.runtime" not in collection_path.read_text() or None


def scope_of(nodeid: str) -> str:
    """Returns what a test shares a process with: its file, or all those of an entry above."""
    place = nodeid.split("::")[0].removeprefix(f"{ROOT.name}/")
    return next((scope for scope, places in SCOPES.items() if place.startswith(places)), place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`, has tests that share a process, and with it their fixtures, run one after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # untyped
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def own_device_locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What measures here waits for no other run of the tests, and for no other process of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run of the tests share."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"


@pytest.fixture(scope="session")
def first_build(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Outcome]:
    """A project that the command built once, and how that ended; not to be changed."""
    from tests.prepare.builders import new_project, prepare_once

    project, outcome = prepare_once(shared_folder / "net", new_project)
    return project.copy_to(tmp_path_factory.mktemp("built") / "project"), outcome


@pytest.fixture
def built(first_build: tuple[Project, Outcome], tmp_path: Path) -> Project:
    """A built project of the test's own."""
    return first_build[0].copy_to(tmp_path / "project")
