"""What holds for every test."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from ortprep.telemetry import disable_telemetry

disable_telemetry()

# Background jobs ignore Ctrl-C, and those under nohup SIGHUP; commands under test would ignore them as well.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

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
    "a cluster": ("ray_inference",),
    "registries": ("registry",),
    "the machine": ("runtime/pool", "doctor", "cli/test_doctor_command.py", "cli/test_serving_commands.py"),
}
"""Tests that share servers, or that count or time what others of their kind would disturb."""

ALONE = ("test_examples.py",)
"""Files whose tests share nothing, and take so long that several processes do them."""


def pytest_ignore_collect(collection_path):
    """Where only what a runtime job needs is installed, passes over the tests that need more."""
    if HAS_HYPOTHESIS or not collection_path.match("test_*.py"):
        return None
    return "pytest.mark.runtime" not in collection_path.read_text() or None


def scope_of(nodeid):
    """Returns what a test shares a process with: its file, or all those of an entry above."""
    place = nodeid.split("::")[0].removeprefix(f"{ROOT.name}/")
    if place in ALONE:
        return nodeid
    return next((scope for scope, places in SCOPES.items() if place.startswith(places)), place)


def pytest_collection_modifyitems(items):
    """Puts first what one process does for minutes, so that no other waits for it at the end."""
    order = [*SCOPES, *ALONE]

    def rank(item):
        scope = scope_of(item.nodeid)
        return next((i for i, name in enumerate(order) if name in scope), len(order))

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n 2`, has tests that share a process, and with it their fixtures, run one after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid)

    config.option.loadscopereorder = False  # as `pytest_collection_modifyitems` has it
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def own_device_locks(tmp_path_factory):
    """What measures here waits for no other run of the tests, and for no other process of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder that all processes of this run of the tests share."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"


@pytest.fixture(scope="session")
def first_build(shared_folder, tmp_path_factory):
    """A project that the command built once, and how that ended; not to be changed."""
    from tests.prepare.builders import new_project, prepare_once

    project, outcome = prepare_once(shared_folder / "net", new_project)
    return project.copy_to(tmp_path_factory.mktemp("built") / "project"), outcome


@pytest.fixture
def built(first_build, tmp_path):
    """A built project of the test's own."""
    return first_build[0].copy_to(tmp_path / "project")
