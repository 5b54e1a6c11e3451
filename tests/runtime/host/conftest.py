import os
import select
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ortprep.runtime.host.folder import HostFolder
from ortprep.runtime.host.models import HostConfig
from ortprep.runtime.host.process import read_status, stop_host
from ortprep.runtime.host.server import Server
from tests.fakes import freeze, wait_for
from tests.runtime.builders import write_bundle
from tests.runtime.pool.conftest import descriptors


def hosts(folder):
    """Every process that has the folder of a host open, but for this one."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            for path in (process / "fd").iterdir():
                with suppress(OSError):  # it was closed
                    if path.readlink() == folder:
                        found.add(int(process.name))
    return found - {os.getpid()}


def kill_host():
    """Kills the host, and waits until it is gone: its connections may be closed after what it listens on."""
    status = read_status()
    process = os.pidfd_open(status["pid"])
    signal.pidfd_send_signal(process, signal.SIGKILL)
    select.select([process], [], [])
    os.close(process)
    assert read_status() is None


def freeze_host():
    """Stops all threads of the host, and returns its process number."""
    pid = int(read_status()["pid"])
    freeze(pid)
    return pid


@contextmanager
def host_in_this_process(config=None):
    """A host whose functions a test can replace."""
    folder = HostFolder(make=True)
    server = Server(folder, config or HostConfig())
    try:
        yield server
    finally:
        assert server.stop(20)
        folder.close()


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path, monkeypatch):
    """The folder of this test's hosts; none is left afterwards, nor a socket, nor a descriptor."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    folder, opened = runtime / "ortprep" / "host", descriptors()
    yield folder
    if folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700 and not folder.is_symlink():
        stop_host()
        assert list(folder.iterdir()) == []
    wait_for(lambda: not hosts(folder), what="no host is left")
    wait_for(lambda: descriptors() <= opened, what="no descriptor is left")


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "linear")
