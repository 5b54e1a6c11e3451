"""Functions and programs in child processes: answers, errors and deaths come back, and nobody is left."""

import errno
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from ortprep.children.child import run_child
from ortprep.children.process_group import start_program, wait_for_end
from ortprep.errors import ChildError, ChildKilledError, ChildTimeoutError, IntegrityError
from tests.children import fakes
from tests.fakes import is_alive, wait_for

pytestmark = pytest.mark.runtime

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0


def assert_gone(pid):
    wait_for(lambda: not is_alive(pid), what=f"process {pid} ends")


def wait_for_pid(file):
    return int(wait_for(lambda: file.exists() and file.read_text(), what=f"{file} is written"))


def test_an_answer_arrives_whole_from_another_process():
    request = {"text": "ü\n\0", "list": [1, 2.5, None, True], "nested": {"a": {}}}
    reply = run_child(fakes.echo, request)
    assert reply.value["request"] == request
    assert reply.value["pid"] != os.getpid()
    assert reply.elapsed_s > 0


def test_a_child_imports_from_where_its_parent_does(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('a file of the working folder was imported')")
    (tmp_path / "ortprep").mkdir()
    (tmp_path / "ortprep" / "__init__.py").write_text("raise RuntimeError('so was a folder')")
    monkeypatch.chdir(tmp_path)
    value = run_child(fakes.echo, {}).value
    assert value["path"] == [entry or str(tmp_path) for entry in sys.path]
    assert value["folder"] == str(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT], ids=lambda s: s.name)
def test_a_child_that_dies_of_a_signal_is_an_error_that_names_it(number):
    with pytest.raises(
        ChildError, match=rf"kill_itself \(pid \d+\)\n  expected an answer, got {number.name}"
    ) as caught:
        run_child(fakes.kill_itself, {"signal": int(number)})
    # Only SIGKILL never comes from the program itself.
    assert isinstance(caught.value, ChildKilledError) == (number == signal.SIGKILL)


@pytest.mark.parametrize(("function", "code"), [(fakes.vanish, 0), (fakes.exit_loudly, 3)])
def test_a_child_that_ends_without_an_answer_is_an_error_with_its_code_even_with_0(function, code):
    with pytest.raises(ChildError, match=f"got exit code {code}"):
        run_child(function, {})


def test_a_child_past_its_deadline_is_killed_though_it_ignores_signals(tmp_path, monkeypatch):
    pid_file = tmp_path / "pid"

    class LateTimer(threading.Timer):
        """Starts to count once the child hangs: how long it takes to get there is up to the machine."""

        def run(self):
            wait_for_pid(pid_file)
            super().run()

    monkeypatch.setattr(threading, "Timer", LateTimer)
    with pytest.raises(ChildTimeoutError, match="within 2 s\n    about to hang"):
        run_child(fakes.hang, {"pid_file": str(pid_file)}, timeout_s=2)
    assert not is_alive(int(pid_file.read_text()))


def test_a_program_that_ignores_its_childrens_ends_gets_answers_and_errors_too():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_child(fakes.echo, {}).value["request"] == {}
        with pytest.raises(ChildError, match="expected an answer"):
            run_child(fakes.kill_itself, {"signal": int(signal.SIGKILL)})
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_an_error_of_the_package_arrives_with_class_message_and_hint():
    with pytest.raises(IntegrityError) as caught:
        run_child(fakes.raise_known, {})
    assert type(caught.value) is IntegrityError
    assert caught.value.message == "bytes differ: weights\n  expected a, got ü"
    assert caught.value.hint == "ortprep check here"


def test_an_unforeseen_exception_arrives_with_its_traceback():
    with pytest.raises(ChildError, match=r"(?s)exit code 1.*raise_value_error.*nobody foresaw this"):
        run_child(fakes.raise_value_error, {})


@pytest.mark.parametrize("memory_bytes", [None, 2**30])
def test_running_out_of_memory_or_of_its_limit_is_said_so(memory_bytes):
    function = fakes.allocate if memory_bytes else fakes.raise_memory_error
    with pytest.raises(ChildError, match="out of memory"):
        run_child(function, {"size_bytes": 2**31}, memory_bytes=memory_bytes)


@pytest.mark.parametrize("function", ["write_to_full_disk", "answer_on_full_disk"])
def test_a_full_disk_is_said_so_and_never_a_failure_of_what_was_tried(function):
    with pytest.raises(OSError, match="No space left on device") as caught:
        run_child(getattr(fakes, function), {})
    assert caught.value.errno == errno.ENOSPC


def test_an_answer_that_is_no_json_is_an_error():
    with pytest.raises(ChildError, match="unreadable answer"):
        run_child(fakes.return_unserialisable, {})


def test_what_a_child_leaves_running_ends_with_it():
    pid = run_child(fakes.leave_grandchild, {}).value["pid"]
    assert_gone(pid)


def test_what_a_crashed_child_forked_ends_with_it(tmp_path):
    pid_file = tmp_path / "pid"
    with pytest.raises(ChildError, match="SIGSEGV"):
        run_child(fakes.fork_then_die, {"pid_file": str(pid_file)})
    assert_gone(int(pid_file.read_text()))


def test_no_temporary_file_is_left(tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_child(fakes.echo, {})
    with pytest.raises(ChildError):
        run_child(fakes.vanish, {})
    assert list(tmp_path.iterdir()) == []


PARENT = """
import os, signal, sys
from ortprep.children.child import run_child
from tests.children.fakes import hang
signal.signal(signal.SIGINT, signal.default_int_handler)
open_of = os.pidfd_open
def say_and_open(*arguments):
    print("waiting", flush=True)
    return open_of(*arguments)
os.pidfd_open = say_and_open
run_child(hang, {"pid_file": sys.argv[1]})
"""


@contextmanager
def parent_of_hanging_child(pid_file):
    """Yields a process that waits for its child, and that child's number once it hangs."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(pid_file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with parent:
        try:
            assert parent.stdout.readline() == b"waiting\n"
            yield parent, wait_for_pid(pid_file)
        finally:
            parent.kill()


def test_a_child_ends_with_its_parent(tmp_path):
    with parent_of_hanging_child(tmp_path / "pid") as (parent, pid):
        assert is_alive(pid)
        parent.kill()
        parent.wait()
    assert_gone(pid)


def test_an_interrupted_wait_ends_the_child(tmp_path):
    with parent_of_hanging_child(tmp_path / "pid") as (parent, pid):
        parent.send_signal(signal.SIGINT)
        assert parent.wait(PATIENCE_S) != 0
    assert not is_alive(pid)


# -- programs in a process group of their own end with this process, and run as they would without it

STARTER = """
import os, sys, time
from pathlib import Path
from ortprep.children.process_group import start_program

with open(os.devnull, "wb") as null:
    run = ["sh", "-c", "echo $$ > pid; exec sleep 600"]
    options = {"environment": dict(os.environ), "stdout": null, "stderr": null}
    process = start_program(run, folder=Path.cwd(), **options)
while not Path("pid").exists() or not Path("pid").read_text():
    time.sleep(0.01)
print(Path("pid").read_text(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [9, 15])
def test_a_program_ends_with_the_process_that_started_it(tmp_path, number):
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as starter:
        program = int(starter.stdout.readline())
        starter.send_signal(number)
    assert_gone(program)


def test_a_program_gets_its_arguments_its_environment_and_the_usual_signals(tmp_path):
    run = [
        sys.executable,
        "-c",
        "import os, sys; print(sys.argv[1:], os.environ['OWN'])\n"
        "print([line for line in open('/proc/self/status') if line.startswith('SigIgn')])",
        "-a",
        "b c",
        "",
    ]
    environment = {"OWN": "value", "PATH": os.environ["PATH"]}
    with (tmp_path / "out").open("w+b") as out:
        options = {"environment": environment, "stdout": out, "stderr": out}
        process = start_program(run, folder=tmp_path, **options)
        assert not wait_for_end(process, 60)
    expected = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "out").read_text() == expected
    assert process.returncode == 0


def test_no_library_is_opened_between_fork_and_program(tmp_path, monkeypatch):
    # The loader's state may be half changed there, by another thread that opened a library at the fork.
    monkeypatch.setattr("ctypes.CDLL", None)
    with (tmp_path / "out").open("wb") as out:
        options = {"environment": dict(os.environ), "stdout": out, "stderr": out}
        process = start_program(["true"], folder=tmp_path, **options)
        assert not wait_for_end(process, 60)
    assert process.returncode == 0


def test_a_program_that_is_not_there_is_an_error(tmp_path):
    with (tmp_path / "out").open("wb") as out:
        options = {"environment": dict(os.environ), "stdout": out, "stderr": out}
        with pytest.raises(FileNotFoundError, match="No such file or directory"):
            start_program(["no-such-program"], folder=tmp_path, **options)
