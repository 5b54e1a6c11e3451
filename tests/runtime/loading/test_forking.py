"""What a fork inherits: laws of the session of a parent and of its children, each in a process of its own."""

import onnxruntime
import pytest

from ortprep.errors import LoadError
from ortprep.runtime import load_before_fork
from ortprep.runtime.loading import phases
from tests.runtime.builders import write_bundle
from tests.runtime.dropin.builders import run_python

pytestmark = pytest.mark.runtime

PRELUDE = """
import os, sys, threading, warnings
import numpy as np
from ortprep.runtime import load, load_before_fork, wait_steady
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, of forks beside threads
x = {"x": np.arange(8, dtype=np.float32).reshape(1, 8)}

def threads():
    return len(os.listdir("/proc/self/task"))

def in_child(check):
    pid = os.fork()
    if pid == 0:
        try:
            check()
        except Exception:
            import traceback
            traceback.print_exc()
            os._exit(1)
        sys.exit(0)  # as an application ends, sessions freed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def same(session):
    return np.array_equal(session.run(None, x)[0], expected)

"""


def assert_passes(bundle, script):
    """Runs a script in a fresh process, `bundle` being its argument."""
    done = run_python(PRELUDE + script, bundle)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "linear")


def test_a_child_runs_on_what_its_parent_loaded(bundle):
    assert_passes(
        bundle,
        """
before = threads()
session = load_before_fork(sys.argv[1])
assert threads() == before
expected = session.run(None, x)[0]
assert np.array_equal(expected, load(sys.argv[1]).run(None, x)[0])
native = id(session._sess)

def check():
    assert same(session) and id(session._sess) == native
    assert session.get_session_options().intra_op_num_threads == 1

for _ in range(3):
    in_child(check)
assert same(session)
""",
    )


@pytest.mark.skipif(not phases.may_swap(), reason="ONNX Runtime before 1.31, or a single core")
def test_children_change_to_threads_of_their_own_and_the_parent_never_does(bundle):
    assert_passes(
        bundle,
        """
session = load_before_fork(sys.argv[1], threads_after=2)
before, native = threads(), id(session._sess)
expected = session.run(None, x)[0]
wait_steady(session)
assert threads() == before

def grandchild():
    assert threads() == 1 and same(session) and id(session._sess) == native
    assert session.get_session_options().intra_op_num_threads == 1
    wait_steady(session)
    assert same(session) and session.get_session_options().intra_op_num_threads == 2

def child():
    assert same(session)
    wait_steady(session)
    assert same(session) and session.get_session_options().intra_op_num_threads == 2
    in_child(grandchild)
    assert same(session)

for _ in range(3):
    in_child(child)
assert session.get_session_options().intra_op_num_threads == 1
""",
    )


@pytest.mark.attack
def test_children_of_a_parent_that_is_running_run_what_it_loaded_also_once_the_bundle_was_replaced(bundle):
    write_bundle(bundle.parent / "next", seed=1)
    assert_passes(
        bundle,
        """
session = load_before_fork(sys.argv[1])
expected = session.run(None, x)[0]
native, over = id(session._sess), threading.Event()
many = {"x": np.repeat(x["x"], 3000, axis=0)}

def keep_running():
    while not over.is_set():
        session.run(None, many)

others = [threading.Thread(target=keep_running) for _ in range(3)]
for other in others:
    other.start()
os.rename(sys.argv[1], sys.argv[1] + ".old")
os.rename(os.path.dirname(sys.argv[1]) + "/next", sys.argv[1])
for _ in range(10):
    in_child(lambda: sys.exit("wrong") if not same(session) or id(session._sess) != native else None)
over.set()
for other in others:
    other.join()
""",
    )


def test_a_fork_waits_for_the_runs_of_other_threads_whatever_a_handler_raises(bundle):
    assert_passes(
        bundle,
        """
import signal, time
session = load_before_fork(sys.argv[1])
expected = session.run(None, x)[0]
running = session._ortprep_forks.running
running.add(-1)  # as if another thread were in a run
def handle(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.05)
threading.Timer(0.2, running.discard, [-1]).start()
began = time.monotonic()
in_child(lambda: sys.exit("wrong") if not same(session) else None)
assert time.monotonic() - began > 0.15 and same(session)
""",
    )


def test_a_child_that_was_forked_in_a_run_without_pythons_knowledge_says_so(bundle):
    assert_passes(
        bundle,
        """
from ortprep.errors import LoadError
from ortprep.runtime.loading import forking
session = load_before_fork(sys.argv[1])
session._ortprep_forks.running.add(-1)
forking._after_fork()  # as `PyOS_AfterFork_Child`, which a server calls that forks in C
try:
    session.run(None, x)
except LoadError as error:
    assert "cannot run after this fork" in str(error)
else:
    sys.exit("expected an error")
""",
    )


def test_a_child_of_a_parent_that_is_loading_can_load(bundle):
    assert_passes(
        bundle,
        """
from ortprep.runtime.loading import session as session_module
from ortprep.runtime.loading.load_options import NO_DEADLINE
expected = load(sys.argv[1]).run(None, x)[0]
held, over = threading.Event(), threading.Event()

def hold():
    plan = session_module.default_plan("m.onnx")
    session_module.create_alone(plan, NO_DEADLINE, lambda: held.set() or over.wait())

other = threading.Thread(target=hold)
other.start()
held.wait()
in_child(lambda: sys.exit("wrong") if not same(load(sys.argv[1])) else None)
over.set()
other.join()
""",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"session_options": {"intra_op_num_threads": 2}}, "expected no intra_op_num_threads"),
        (
            {"session_options": {"inter_op_num_threads": 2}},
            "inter_op_num_threads in session_options, or 0 or 1",
        ),
        ({"session_options": {"execution_mode": "ORT_PARALLEL"}}, "expected no execution_mode"),
        ({"session_options": {"use_per_session_threads": False}}, "expected no use_per_session_threads"),
        ({"session_options": onnxruntime.SessionOptions()}, "expected values by attribute"),
        ({"threads_after": 0}, "expected None, or a number from 1"),
        ({"threads_after": "2"}, "expected None, or a number from 1"),
    ],
)
def test_what_cannot_be_inherited_is_refused_at_the_call(bundle, arguments, said):
    with pytest.raises(LoadError, match=said):
        load_before_fork(bundle, **arguments)


def test_the_thread_of_the_telemetry_is_refused(bundle):
    script = """
import onnxruntime, sys, types, warnings
from ortprep.errors import LoadError
from ortprep.runtime import load_before_fork
warnings.simplefilter("ignore")
onnxruntime.__version__ = "1.31.1"  # one that sends
try:
    load_before_fork(sys.argv[1])
except LoadError as error:
    assert "ORT_DISABLE_TELEMETRY=1 before onnxruntime is imported" in str(error)
else:
    sys.exit("expected an error")
"""
    ended = run_python(script, bundle, ORT_DISABLE_TELEMETRY="0")
    assert (ended.returncode, ended.stderr) == (0, "")
