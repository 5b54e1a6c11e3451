"""Two phases behind one `load`: laws of who serves, of what is freed, and of what ends a build."""

import gc
import itertools
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import ortprep
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.errors import IntegrityError, LoadError, LoadTimeoutError
from ortprep.runtime import load, wait_steady
from ortprep.runtime.loading import opened_bundle, phases
from ortprep.runtime.loading import session as session_module
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.loading.session import default_plan
from ortprep.runtime.opened_model import open_model
from ortprep.runtime.tensors.arrays import run_session
from tests.fakes import Interruption, wait_for
from tests.runtime.builders import (
    ROWS,
    rewrite_digests,
    sample,
    weights_of,
    write_bundle,
    write_chain,
    write_linear,
)
from tests.runtime.dropin.builders import write_bundle_of, write_source

pytestmark = [
    pytest.mark.runtime,
    pytest.mark.skipif(not phases.may_swap(), reason="ONNX Runtime before 1.31, or a single core"),
]

PATIENCE_S = 300.0
"""How long a test waits for what must happen; passing takes no time."""

FIRST = SessionOptionsRecord(
    "ORT_DISABLE_ALL", {"intra_op_num_threads": 1}, {"session.disable_prepacking": "1"}
)
STEADY = SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": 2})


@pytest.fixture(autouse=True)
def no_build_left():
    yield
    gc.collect()
    wait_for(lambda: not phases._UNDER_WAY, what="every build has ended")


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "linear", options=STEADY, first=FIRST)


@pytest.fixture
def chain(tmp_path):
    """A bundle that takes long to load."""
    folder = write_bundle(tmp_path / "chain", options=STEADY, first=FIRST)
    write_chain(folder / "cpu/linear_optimized.onnx", 12_000)
    rewrite_digests(folder)
    return folder


def replace_steady(monkeypatch, change):
    """Has every session but the first made of another plan."""
    build = vars(opened_bundle)["build_session"]
    plans = []

    def build_changed(plan, **kwargs):
        plans.append(plan)
        return build(plan if len(plans) == 1 else change(plan), **kwargs)

    monkeypatch.setattr(opened_bundle, "build_session", build_changed)


def answer(session, feed=None):
    (output,) = session.run(None, {"x": sample() if feed is None else feed})
    return np.asarray(output)


def expected(feed=None, seed=0):
    return np.asarray((sample() if feed is None else feed) @ weights_of(seed))


def assert_right(got, feed=None):
    np.testing.assert_allclose(got, expected(feed), rtol=1e-4, atol=1e-5)


def threads_of(session):
    return int(session.get_session_options().intra_op_num_threads)


def test_f19_the_first_phase_serves_first_and_the_variants_own_options_after_it(bundle):
    session = load(bundle)
    assert isinstance(session, onnxruntime.InferenceSession)
    assert threads_of(session) == 1
    assert_right(answer(session))
    wait_steady(session, PATIENCE_S)
    assert threads_of(session) == 2
    assert_right(answer(session))


@pytest.mark.parametrize(("choice", "threads"), [("steady", 2), ("first", 1)])
def test_f19_a_caller_may_take_one_phase(bundle, choice, threads, sessions):
    session = load(bundle, phases=choice)
    answer(session)
    wait_steady(session, 0)
    assert threads_of(session) == threads
    assert type(session) is onnxruntime.InferenceSession
    assert len(sessions) == 1


@pytest.mark.parametrize("why_not", ["no first phase", "a single core", "a profile"])
def test_one_phase_serves_where_two_do_not_pay(tmp_path, monkeypatch, why_not):
    monkeypatch.chdir(tmp_path)
    first = None if why_not == "no first phase" else FIRST
    folder = write_bundle(tmp_path / "b", options=STEADY, first=first)
    if why_not == "a single core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    options = {"enable_profiling": True} if why_not == "a profile" else None
    session = load(folder, session_options=options)
    assert type(session) is onnxruntime.InferenceSession
    assert threads_of(session) == (1 if why_not == "a single core" else 2)


def test_nothing_is_built_before_the_first_run(bundle, sessions):
    session = load(bundle)
    assert (len(sessions), len(phases._UNDER_WAY)) == (1, 0)
    answer(session)
    wait_steady(session, PATIENCE_S)
    assert len(sessions) == 2


def test_a_process_that_ends_after_its_first_run_has_no_second_session_to_wait_for(
    bundle, sessions, monkeypatch
):
    monkeypatch.setattr(phases, "_GRACE_S", PATIENCE_S)
    session = load(bundle)
    answer(session)
    vars(session)["_ortprep_steady"].end()  # what the interpreter does at its end
    assert len(sessions) == 1


def run_across_the_swap(session, seed, *, runs):
    """Runs until the swap has happened, and so many runs more; returns the phases before and after each."""
    rng = np.random.default_rng(seed)
    seen = set()
    done = 0
    patience = time.monotonic() + PATIENCE_S
    while done < runs:
        assert time.monotonic() < patience
        feed = rng.standard_normal((1 + done % 3, ROWS)).astype(np.float32)
        before = threads_of(session)
        got = answer(session, feed)
        seen.add((before, threads_of(session)))
        assert_right(got, feed)
        done += before == 2
    return seen


def test_every_answer_from_many_threads_is_right_across_the_swap(bundle):
    workers, session = 8, load(bundle)
    with ThreadPoolExecutor(workers) as pool:
        together = threading.Barrier(workers)

        def work(seed):
            together.wait(PATIENCE_S)
            return run_across_the_swap(session, seed, runs=300)

        seen = set().union(*pool.map(work, range(workers)))
    assert {before for before, _ in seen} == {1, 2}
    assert (2, 1) not in seen


def test_the_first_session_is_freed_once_the_steady_one_serves(bundle, sessions):
    session = load(bundle)
    answer(session)
    wait_steady(session, PATIENCE_S)
    gc.collect()
    first, steady = sessions
    assert first() is None
    assert steady() is not None


def test_it_answers_what_a_session_answers(bundle):
    plain, session = load(bundle, phases="steady"), load(bundle)
    for _ in range(2):
        for ours, theirs in [
            (session.get_inputs(), plain.get_inputs()),
            (session.get_outputs(), plain.get_outputs()),
            (session.get_overridable_initializers(), plain.get_overridable_initializers()),
        ]:
            described = [(node.name, node.type, node.shape) for node in theirs]
            assert [(node.name, node.type, node.shape) for node in ours] == described
        assert session.get_providers() == plain.get_providers()
        assert session.get_provider_options() == plain.get_provider_options()
        assert session.get_modelmeta().graph_name == plain.get_modelmeta().graph_name
        assert_right(run_session(session, {"x": sample()})["y"])
        with pytest.raises(ValueError, match="missing from input feed"):
            session.run(None, {"unknown": sample()})
        value = onnxruntime.OrtValue.ortvalue_from_numpy(sample())
        (got,) = session.run_with_ort_values(["y"], {"x": value})
        assert_right(got.numpy())
        wait_steady(session, PATIENCE_S)


def test_a_binding_waits_for_the_steady_session(bundle):
    session = load(bundle)
    binding = session.io_binding()
    assert threads_of(session) == 2
    binding.bind_cpu_input("x", sample())
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    assert_right(binding.copy_outputs_to_cpu()[0])


def test_options_that_onnxruntime_refuses_leave_the_first_in_service(tmp_path, caplog):
    # One group of processors too few.
    groups = {"session.intra_op_thread_affinities": "1"}
    refused = SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": 3}, groups)
    session = load(write_bundle(tmp_path / "b", options=refused, first=FIRST))
    answer(session)
    for _ in range(2):
        with pytest.raises(LoadError, match="affinities"):
            wait_steady(session, PATIENCE_S)
    assert threads_of(session) == 1
    assert_right(answer(session))
    binding = session.io_binding()  # of the session that stays
    assert binding is not None
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the first session stays in service: ONNX Runtime cannot load" in record.getMessage()


def test_a_steady_session_that_answers_wrongly_never_serves(bundle, tmp_path, sessions, monkeypatch):
    other = str(write_linear(tmp_path / "other.onnx", weights_of(9))[0])
    replace_steady(monkeypatch, lambda plan: default_plan(other))
    session = load(bundle, check="golden")
    with pytest.raises(LoadError, match="does not answer as recorded"):
        wait_steady(session, PATIENCE_S)
    assert_right(answer(session))
    gc.collect()
    assert [one() is None for one in sessions] == [False, True], "what failed must not be kept"


def test_f17_files_exchanged_between_the_two_sessions_are_reported(bundle):
    session = load(bundle)
    write_bundle(bundle, seed=7, options=STEADY, first=FIRST)
    with pytest.raises(IntegrityError, match="files changed while they were loaded"):
        wait_steady(session, PATIENCE_S)
    assert threads_of(session) == 1


@pytest.mark.parametrize("choice", ["auto", "steady"])
def test_f19_a_first_phase_may_ask_for_no_more_than_a_variant(tmp_path, choice):
    first = SessionOptionsRecord("ORT_DISABLE_ALL", {"optimized_model_filepath": "x"})
    with pytest.raises(IntegrityError, match="'optimized_model_filepath' must not be set"):
        load(write_bundle(tmp_path / "b", options=STEADY, first=first), phases=choice)


def test_waiting_ends_in_time_and_the_build_goes_on(chain):
    session = load(chain)
    with pytest.raises(
        LoadTimeoutError, match=r"not in service yet: variant cpu of .*\n  expected it within 0 s"
    ):
        wait_steady(session, 0)
    wait_steady(session, PATIENCE_S)
    assert threads_of(session) == 2


@pytest.mark.attack
def test_a_run_that_a_signal_interrupts_anywhere_still_brings_the_steady_session(bundle):
    for moment in itertools.count():
        session = load(bundle)
        sys.setprofile(Interruption(moment))
        try:
            answer(session)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        wait_steady(session, 30)
        assert threads_of(session) == 2
    assert moment >= 4


def test_a_load_that_somebody_waits_for_goes_first(chain, bundle, sessions):
    session = load(chain)
    with pytest.raises(LoadTimeoutError):
        wait_steady(session, 0)
    wait_for(lambda: bool(session_module._IN_BACKGROUND), what="the build is in ONNX Runtime")
    other = load(bundle, phases="steady")
    assert len(sessions) == 2, "the build in the background must not have been waited for"
    assert_right(answer(other))
    wait_steady(session, PATIENCE_S)
    assert (len(sessions), threads_of(session)) == (3, 2)


def test_the_steady_session_is_made_at_the_lowest_priority_and_runs_at_the_callers(bundle, monkeypatch):
    lowered = {}
    set_priority = os.setpriority

    def note(which, thread, priority):
        set_priority(which, thread, priority)
        lowered[thread] = os.getpriority(which, thread)

    monkeypatch.setattr(os, "setpriority", note)
    before = threads_of_this_process()
    session = load(bundle)
    wait_steady(session, PATIENCE_S)
    assert list(lowered.values()) == [19]
    workers = threads_of_this_process() - before - lowered.keys()
    assert workers
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in workers} == {own}


def threads_of_this_process():
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def _wait_in_a_fork(session, answers):
    try:
        wait_steady(session, PATIENCE_S)
    except LoadError as error:
        answers.put(str(error))


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent(chain):
    session, context = load(chain), multiprocessing.get_context("fork")
    with pytest.raises(LoadTimeoutError):
        wait_steady(session, 0)
    answers = context.SimpleQueue()
    child = context.Process(target=_wait_in_a_fork, args=(session, answers))
    child.start()
    child.join(60)
    assert child.exitcode is not None
    assert "this process was forked" in answers.get()


EXIT = """
import sys
from ortprep.errors import LoadTimeoutError
from ortprep.runtime import PoolConfig, SessionPool, load, wait_steady

session = load(sys.argv[1])
try:
    wait_steady(session, float(sys.argv[2]))
except LoadTimeoutError:
    pass
print("ends", flush=True)
if sys.argv[3] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("wait_s", "end", "code"), [(0, "raise", 3), (0.1, "return", 0)])
def test_an_interpreter_that_ends_during_a_build_neither_hangs_nor_crashes(chain, wait_s, end, code):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", EXIT, str(chain), str(wait_s), end],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (code, "", "ends")


@pytest.mark.parametrize("given", ["nothing", "options"])
def test_an_unmodified_application_gets_both_phases(tmp_path, monkeypatch, given):
    model = write_source(tmp_path / "linear.onnx")
    write_bundle_of(model, tmp_path / "bundles/linear", options=STEADY, first=FIRST)
    monkeypatch.setenv("ORTPREP_BUNDLES", str(tmp_path / "bundles"))
    options = None if given == "nothing" else onnxruntime.SessionOptions()
    if options is not None:
        options.enable_cpu_mem_arena = False
    served = ortprep.session(model, options)
    assert isinstance(served, onnxruntime.InferenceSession)
    first = threads_of(served)
    answer(served)
    if options is not None:
        options.enable_cpu_mem_arena = True  # later than its session
    wait_steady(served, PATIENCE_S)
    assert (first, threads_of(served)) == (1, 2)
    assert served.get_session_options().enable_cpu_mem_arena is (options is None)
    served.set_providers(["CPUExecutionProvider"])  # made anew of what the application passed
    assert served.get_session_options().graph_optimization_level.name == "ORT_ENABLE_ALL"


def test_a_process_that_serves_a_model_is_ready_with_the_first_phase(bundle, sessions):
    model = open_model(str(bundle), ModelLoadOptions())
    assert_right(model.run({"x": sample()})["y"])
    wait_steady(model.session, PATIENCE_S)
    assert (len(sessions), threads_of(model.session)) == (2, 2)
    assert_right(model.run({"x": sample()})["y"])
