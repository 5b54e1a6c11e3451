"""What measures has its device alone, and loads what it measures as a job would."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ortprep.bundle.loader_config import TensorSpec, Variant
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.errors import CacheError, LoadError, StageError
from ortprep.measuring.device_lock import lock_folder, measuring, working
from ortprep.measuring.staged_bundles import StagedBundles
from ortprep.runtime import load, open_bundle
from ortprep.runtime.loading.session import default_plan
from tests.runtime.builders import COLUMNS, CPU_ONLY, ROWS, UNMET, assert_answers, weights_of, write_linear

pytestmark = pytest.mark.runtime

PATIENCE_S = 120.0

HOLDER = """
import sys
from ortprep.measuring.device_lock import measuring, working
block = working() if sys.argv[1] == "working" else measuring(sys.argv[1])
with block:
    print("holding", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def private_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@contextmanager
def other_process(what):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"holding\n"
        yield process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class Taker(threading.Thread):
    """Takes a lock as another program would; `waiting` and `holding` tell how far it got."""

    def __init__(self, take):
        super().__init__(daemon=True)
        self._take = take
        self.waiting, self.holding, self.release = threading.Event(), threading.Event(), threading.Event()
        self.start()

    def run(self):
        with self._take(on_wait=self.waiting.set):
            self.holding.set()
            self.release.wait()


def measure_cpu(*, on_wait):
    return measuring("cpu", on_wait=on_wait)


def measure_gpu(*, on_wait):
    return measuring("cuda:0", on_wait=on_wait)


@contextmanager
def taking(take):
    taker = Taker(take)
    try:
        yield taker
    finally:
        taker.release.set()
        taker.join(PATIENCE_S)
        assert not taker.is_alive()


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ("cpu", measure_cpu),
        ("cpu", working),
        ("cuda:0", working),
        ("cuda:1", measure_gpu),
        ("working", measure_cpu),
    ],
)
def test_a_measurement_is_alone_on_the_machine(held, wanted):
    with other_process(held) as holder, taking(wanted) as taker:
        assert taker.waiting.wait(PATIENCE_S)
        assert not taker.holding.is_set()
        holder.communicate()
        assert taker.holding.wait(PATIENCE_S)


def test_a_killed_holder_holds_nothing():
    with other_process("cuda:0") as holder, taking(measure_gpu) as taker:
        assert taker.waiting.wait(PATIENCE_S)
        holder.send_signal(signal.SIGKILL)
        assert taker.holding.wait(PATIENCE_S)


def test_a_waiting_measurement_is_not_overtaken():
    with other_process("working") as holder, taking(measure_cpu) as measurement:
        assert measurement.waiting.wait(PATIENCE_S)
        with taking(working) as late:
            assert late.waiting.wait(PATIENCE_S)
            holder.communicate()
            assert measurement.holding.wait(PATIENCE_S)
            assert not late.holding.is_set()
            measurement.release.set()
            assert late.holding.wait(PATIENCE_S)


def test_a_child_process_does_not_inherit_the_lock():
    with measuring("cpu"):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        with taking(working) as taker:
            assert taker.holding.wait(PATIENCE_S)
    finally:
        child.communicate(b"\n")


def test_work_within_work_waits_for_nobody():
    held = ExitStack()
    held.enter_context(working())
    with taking(measure_cpu) as measurement:
        assert measurement.waiting.wait(PATIENCE_S)
        with working():
            assert not measurement.holding.is_set()
        held.close()
        assert measurement.holding.wait(PATIENCE_S)


def test_measuring_within_work_is_refused_instead_of_waiting_for_ever():
    with working(), pytest.raises(StageError, match="already works"), measuring("cpu"):
        raise AssertionError("two locks that exclude each other were both given")


def test_a_folder_that_others_can_write_and_a_link_in_its_place_are_refused(tmp_path):
    assert lock_folder().is_relative_to(tmp_path)
    assert lock_folder().stat().st_mode & 0o777 == 0o700
    folder, elsewhere = tmp_path / "ortprep", tmp_path / "elsewhere"
    shutil.rmtree(folder)
    elsewhere.mkdir(mode=0o700)
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(CacheError, match="not safe"):
        lock_folder()
    folder.rmdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(CacheError, match="not safe") as caught:
        lock_folder()
    assert "unset XDG_RUNTIME_DIR" in str(caught.value.hint)


@pytest.mark.attack
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to someone else")
def test_another_user_neither_keeps_this_one_from_measuring_nor_moves_its_locks(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    usual = lock_folder()
    theirs = temporary / f"ortprep-{os.getuid()}"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    assert lock_folder() == usual
    with measuring("cpu"):
        assert any(usual.iterdir())
    monkeypatch.setenv("ORTPREP_CACHE_DIR", os.devnull)
    with pytest.raises(CacheError, match="not safe") as caught:
        lock_folder()
    assert "ORTPREP_CACHE_DIR" in str(caught.value.hint)
    theirs.rmdir()
    temporary.chmod(0o777)  # not sticky: others could move what is in it
    with pytest.raises(CacheError, match="not safe"):
        lock_folder()


# -- test_staged_bundles

INPUTS = (TensorSpec("x", "float32", ("batch", ROWS)),)
OUTPUTS = (TensorSpec("y", "float32", ("batch", COLUMNS)),)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "m").mkdir()
    model, _ = write_linear(tmp_path / "m" / "m.onnx", weights_of(0))
    return default_plan(str(model), level="ORT_DISABLE_ALL")


@pytest.fixture
def staged(tmp_path, cache):
    return StagedBundles(tmp_path / "staged", INPUTS, OUTPUTS)


def stage(staged, plan, needs=CPU_ONLY):
    model = Path(plan.model)
    variant = Variant("v", "cpu", model.name, (), plan.session_options, plan.providers, needs)
    return staged.stage(model.parent, variant, timeout_s=600)


def with_threads(plan, count):
    options = SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": count})
    return plan._replace(session_options=options)


def test_a_staged_bundle_loads_as_the_plan_says_and_takes_no_second_copy(staged, plan):
    opened = open_bundle(stage(staged, plan))
    assert_answers(opened.session)
    assert opened.plan.session_options == plan.session_options
    assert Path(opened.plan.model).samefile(plan.model)


def test_every_plan_of_a_model_has_a_bundle_of_its_own(staged, plan):
    wanted = [with_threads(plan, count) for count in (1, 2, 1)]
    bundles = [stage(staged, one) for one in wanted]
    assert bundles[0] == bundles[2] != bundles[1]
    for bundle, one in zip(bundles, wanted, strict=True):
        assert open_bundle(bundle).plan.session_options == one.session_options


def test_what_load_remembers_is_there_before_it_is_measured(staged, plan, cache):
    for count in (1, 2, 1):
        bundle = stage(staged, with_threads(plan, count))
        before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
        assert before
        code = f"from ortprep.runtime import load; load({str(bundle)!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_a_plan_this_machine_does_not_meet_is_an_error_as_it_is_for_a_job(staged, plan):
    with pytest.raises(LoadError, match="no variant of staged"):
        stage(staged, plan, UNMET)
    load(stage(staged, plan))
