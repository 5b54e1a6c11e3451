"""Laws of locks: they last as long as their holder wants, and no longer than its process."""

import subprocess
import sys

import pytest

FORKS = """
import ctypes, os, sys
from ortprep.bundle.file_lock import FileLock

def fork_in_c():
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid

lock = FileLock(sys.argv[1])
assert lock.acquire()
reader, writer = os.pipe()
ready, begun = os.pipe()
fork = os.fork if sys.argv[2] == "Python" else fork_in_c
pid = fork()
if pid == 0:
    os.close(writer)
    other = os.open(os.devnull, os.O_RDONLY)
    lock.close()  # as its last reference goes: not the descriptor that has its number now
    os.fstat(other)
    os.write(begun, b".")
    os.read(reader, 1)
    os._exit(0)
os.read(ready, 1)
assert not FileLock(sys.argv[1]).acquire(wait=False)
lock.close()
assert FileLock(sys.argv[1]).acquire(wait=False)  # while the child lives
os.close(writer)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.attack
@pytest.mark.parametrize("language", ["Python", "C"])
def test_a_lock_ends_with_its_holder_whatever_forks_live_on(tmp_path, language):
    done = subprocess.run([sys.executable, "-c", FORKS, tmp_path / "lock", language], check=False, timeout=60)
    assert done.returncode == 0
