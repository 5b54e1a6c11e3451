from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortprep.bundle.loader_config import read_loader_config, write_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord, SessionPlan
from ortprep.errors import IntegrityError, LoadError, LoadTimeoutError
from ortprep.runtime import ProgressiveSession, load_progressive
from ortprep.runtime.loading import bundle_loader, session
from ortprep.runtime.loading.bundle_loader import open_bundle
from ortprep.runtime.loading.session import default_plan
from ortprep.runtime.tensors.arrays import read_tensors, run_session, write_tensors
from ortprep.runtime.tensors.element_types import Array
from tests.fakes import wait_for
from tests.runtime.builders import (
    ROWS,
    entry,
    rewrite_digests,
    sample,
    weights_of,
    write_bundle,
    write_chain,
    write_linear,
    write_record,
)

pytestmark = pytest.mark.runtime

PATIENCE_S = 300.0
"""How long a test waits for what must happen; passing takes no time."""

FIRST = SessionOptionsRecord(
    "ORT_DISABLE_ALL", {"intra_op_num_threads": 1}, {"session.disable_prepacking": "1"}
)
STEADY = SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": 2})


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in building_threads():
        thread.join(PATIENCE_S)
    assert building_threads() == []


def building_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ortprep-steady"]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "linear", options=STEADY, first=FIRST)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A bundle that takes long to load."""
    folder = write_bundle(tmp_path / "chain", options=STEADY, first=FIRST)
    write_chain(folder / "cpu/linear_optimized.onnx", 30_000)
    rewrite_digests(folder)
    return folder


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Every session that a load makes, in order, as long as somebody keeps it."""
    made: list[weakref.ref[Any]] = []
    build = session.build_session

    def build_noted(*args: Any, **kwargs: Any) -> Any:
        one = build(*args, **kwargs)
        # The session proper, which holds the memory, and not its wrapper.
        made.append(weakref.ref(one._sess))
        return one

    monkeypatch.setattr(bundle_loader, "build_session", build_noted)
    return made


def replace_steady(monkeypatch: pytest.MonkeyPatch, change: Callable[[SessionPlan], SessionPlan]) -> None:
    """Has every session but the first made of another plan."""
    build: Callable[..., Any] = vars(bundle_loader)["build_session"]
    plans: list[SessionPlan] = []

    def build_changed(plan: SessionPlan, **kwargs: Any) -> Any:
        plans.append(plan)
        return build(plan if len(plans) == 1 else change(plan), **kwargs)

    monkeypatch.setattr(bundle_loader, "build_session", build_changed)


def answer(session: ProgressiveSession, feed: Array | None = None) -> Array:
    (output,) = session.run(None, {"x": sample() if feed is None else feed})
    return np.asarray(output)


def expected(feed: Array | None = None, seed: int = 0) -> Array:
    return np.asarray((sample() if feed is None else feed) @ weights_of(seed))


def assert_right(got: Array, feed: Array | None = None) -> None:
    np.testing.assert_allclose(got, expected(feed), rtol=1e-4, atol=1e-5)


def threads_of(session: ProgressiveSession) -> int:
    return int(session.get_session_options().intra_op_num_threads)


def test_f19_the_first_phase_serves_first_and_the_variants_own_options_after_it(bundle: Path) -> None:
    with load_progressive(bundle) as session:
        assert (session.phase, threads_of(session)) == ("first", 1)
        assert_right(answer(session))
        session.wait_steady(PATIENCE_S)
        assert (session.phase, threads_of(session), session.error) == ("steady", 2, None)
        assert_right(answer(session))


def test_f19_a_first_phase_may_be_over_a_file_of_its_own(bundle: Path) -> None:
    write_linear(bundle / "cpu/first/linear_optimized.onnx", weights_of(1))
    config = read_loader_config(bundle)
    variant = config.variants[0]
    assert variant.first_phase is not None
    own = tuple(entry(bundle, f"cpu/first/{path.name}") for path in (bundle / "cpu/first").iterdir())
    first = dataclasses.replace(variant.first_phase, model="cpu/first/linear_optimized.onnx")
    variant = dataclasses.replace(variant, first_phase=first, files=(*variant.files, *own))
    write_loader_config(bundle, dataclasses.replace(config, variants=(variant,)))
    write_record(bundle)
    with load_progressive(bundle) as session:
        np.testing.assert_allclose(answer(session), expected(seed=1), rtol=1e-4, atol=1e-5)
        session.wait_steady(PATIENCE_S)
        assert_right(answer(session))


def test_f19_a_reader_may_pass_over_the_first_phase(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.session.get_session_options().intra_op_num_threads == 2
    assert open_bundle(bundle, plan="first").session.get_session_options().intra_op_num_threads == 1


def test_without_a_first_phase_it_is_steady_at_once(tmp_path: Path) -> None:
    with load_progressive(write_bundle(tmp_path / "b", options=STEADY), steady_after="now") as session:
        assert (session.phase, threads_of(session)) == ("steady", 2)
        session.wait_steady(0)
        assert_right(answer(session))
        assert building_threads() == []


def test_nothing_is_built_before_the_first_run(bundle: Path) -> None:
    with load_progressive(bundle) as session:
        assert (building_threads(), session.phase) == ([], "first")
        run_across_the_swap(session, 0, runs=1)


def test_it_is_built_without_any_run_if_it_is_to_be_so(bundle: Path, sessions: list[Any]) -> None:
    with load_progressive(bundle, steady_after="now") as session:
        wait_for(lambda: session.phase != "first", what="the steady session serves")
        assert len(sessions) == 2


def run_across_the_swap(session: ProgressiveSession, seed: int, *, runs: int) -> set[tuple[str, str]]:
    """Runs until the swap has happened, and so many runs more; returns the phases before and after each."""
    rng = np.random.default_rng(seed)
    phases: set[tuple[str, str]] = set()
    done = 0
    patience = time.monotonic() + PATIENCE_S
    while done < runs:
        assert time.monotonic() < patience
        feed = rng.standard_normal((1 + done % 3, ROWS)).astype(np.float32)
        before = session.phase
        got = answer(session, feed)
        phases.add((before, session.phase))
        assert_right(got, feed)
        done += before == "steady"
    return phases


def test_every_answer_from_many_threads_is_right_across_the_swap(bundle: Path) -> None:
    workers = 8
    with load_progressive(bundle) as session, ThreadPoolExecutor(workers) as pool:
        together = threading.Barrier(workers)

        def work(seed: int) -> set[tuple[str, str]]:
            together.wait(PATIENCE_S)
            return run_across_the_swap(session, seed, runs=300)

        phases = set().union(*pool.map(work, range(workers)))
    assert {before for before, _ in phases} == {"first", "steady"}
    assert ("steady", "first") not in phases


def test_the_first_session_is_freed_once_the_steady_one_serves(bundle: Path, sessions: list[Any]) -> None:
    with load_progressive(bundle) as session:
        # What jobs keep for as long as they live must not keep the first session.
        kept = (session.get_inputs(), session.get_outputs(), session.get_modelmeta(), answer(session))
        session.wait_steady(PATIENCE_S)
        first, steady = sessions
        assert first() is None
        assert steady() is not None
        assert kept[0][0].name == "x"
        assert_right(kept[3])


def test_closed_it_frees_both_sessions(bundle: Path, sessions: list[Any]) -> None:
    session = load_progressive(bundle)
    session.wait_steady(PATIENCE_S)
    session.close()
    assert [one() for one in sessions] == [None, None]


def test_it_answers_what_a_session_answers(bundle: Path) -> None:
    plain = open_bundle(bundle).session
    with load_progressive(bundle) as session:
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
            assert session.get_modelmeta().custom_metadata_map == {}
            assert_right(run_session(session, {"x": sample()})["y"])
            session.wait_steady(PATIENCE_S)


def test_ort_values_run_in_either_phase(bundle: Path) -> None:
    import onnxruntime

    value = onnxruntime.OrtValue.ortvalue_from_numpy(sample())
    with load_progressive(bundle) as session:
        for _ in range(2):
            (got,) = session.run_with_ort_values(["y"], {"x": value})
            session.wait_steady(PATIENCE_S)
            assert_right(got.numpy())


def bind(session: ProgressiveSession) -> Any:
    binding = session.io_binding()
    binding.bind_cpu_input("x", sample())
    binding.bind_output("y")
    return binding


def test_a_binding_made_before_the_swap_runs_after_it(bundle: Path, sessions: list[Any]) -> None:
    with load_progressive(bundle) as session:
        binding = bind(session)
        session.run_with_iobinding(binding)
        session.wait_steady(PATIENCE_S)
        session.run_with_iobinding(binding)
        assert_right(binding.copy_outputs_to_cpu()[0])
        assert sessions[0]() is not None, "a binding must keep its session"
        later = bind(session)
        session.run_with_iobinding(later)
        assert_right(later.copy_outputs_to_cpu()[0])
        del binding
        assert sessions[0]() is None


def test_a_binding_of_another_session_is_an_error(bundle: Path) -> None:
    binding = open_bundle(bundle).session.io_binding()
    with load_progressive(bundle) as session, pytest.raises(LoadError, match="binding of another session"):
        session.run_with_iobinding(binding)


def test_a_run_that_fails_is_the_callers_alone(bundle: Path) -> None:
    with load_progressive(bundle) as session:
        with pytest.raises(ValueError, match="unknown"):
            session.run(None, {"unknown": sample()})
        assert session.phase == "first"
        assert_right(answer(session))


def test_options_that_onnxruntime_refuses_leave_the_first_in_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # One group of processors too few.
    groups = {"session.intra_op_thread_affinities": "1"}
    refused = SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": 3}, groups)
    with load_progressive(write_bundle(tmp_path / "b", options=refused, first=FIRST)) as session:
        answer(session)
        with pytest.raises(LoadError, match="affinities"):
            session.wait_steady(PATIENCE_S)
        assert (session.phase, threads_of(session)) == ("failed", 1)
        assert "affinities" in str(session.error)
        assert_right(answer(session))
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the first session stays in service: ONNX Runtime cannot load" in record.getMessage()


def test_a_steady_session_that_answers_wrongly_never_serves(
    bundle: Path, tmp_path: Path, sessions: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = str(write_linear(tmp_path / "other.onnx", weights_of(9))[0])
    replace_steady(monkeypatch, lambda plan: default_plan(other))
    with load_progressive(bundle, check="golden") as progressive:
        with pytest.raises(LoadError, match="does not answer as recorded"):
            progressive.wait_steady(PATIENCE_S)
        assert progressive.phase == "failed"
        assert_right(answer(progressive))
        for thread in building_threads():
            thread.join(PATIENCE_S)
        assert [one() is None for one in sessions] == [False, True], "what failed must not be kept"


def test_without_the_golden_check_nobody_looks(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = str(write_linear(tmp_path / "other.onnx", weights_of(9))[0])
    replace_steady(monkeypatch, lambda plan: default_plan(other))
    with load_progressive(bundle) as progressive:
        progressive.wait_steady(PATIENCE_S)
        np.testing.assert_allclose(answer(progressive), expected(seed=9), rtol=1e-4, atol=1e-5)


def test_a_first_session_that_answers_wrongly_is_never_returned(bundle: Path) -> None:
    tensors = read_tensors(bundle / "golden.npz")
    write_tensors(bundle / "golden.npz", {**tensors, "output:y": tensors["output:y"] + 1})
    rewrite_digests(bundle)
    with pytest.raises(LoadError, match="does not answer as recorded"):
        load_progressive(bundle, check="golden")


def test_both_sessions_pass_the_golden_check_where_they_are_right(bundle: Path) -> None:
    with load_progressive(bundle, check="golden", digests="full") as session:
        session.wait_steady(PATIENCE_S)
        assert_right(answer(session))


def test_f17_files_exchanged_between_the_two_sessions_are_reported(bundle: Path) -> None:
    with load_progressive(bundle) as session:
        write_bundle(bundle, seed=7, options=STEADY, first=FIRST)
        with pytest.raises(IntegrityError, match="files changed while they were loaded"):
            session.wait_steady(PATIENCE_S)
        assert session.phase == "failed"


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (
            SessionOptionsRecord("ORT_DISABLE_ALL", {"optimized_model_filepath": "x"}),
            "'optimized_model_filepath' must not be set",
        ),
        (
            SessionOptionsRecord("ORT_DISABLE_ALL", {}, {"ep.context_enable": "1"}),
            "'ep.context_enable' must not be set",
        ),
        (
            SessionOptionsRecord("ORT_DISABLE_ALL", {}, {"session.disable_prepacking": "yes"}),
            "expected 0 or 1",
        ),
        (SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": 100_000}), "expected an integer"),
    ],
)
@pytest.mark.parametrize("open_it", [open_bundle, load_progressive])
def test_f19_a_first_phase_may_ask_for_no_more_than_a_variant(
    tmp_path: Path, first: SessionOptionsRecord, message: str, open_it: Callable[[Path], object]
) -> None:
    folder = write_bundle(tmp_path / "b", options=STEADY, first=first)
    with pytest.raises(IntegrityError, match=message):
        open_it(folder)


def test_a_deadline_is_the_first_sessions_alone(bundle: Path) -> None:
    with pytest.raises(LoadTimeoutError):
        load_progressive(bundle, timeout_s=0)
    with load_progressive(bundle, timeout_s=PATIENCE_S) as session:
        session.wait_steady(PATIENCE_S)


@pytest.mark.parametrize("argument", [{"device_id": "0"}, {"timeout_s": "3"}, {"digests": "some"}])
def test_a_wrong_argument_is_told_as_load_tells_it(bundle: Path, argument: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="bad argument of load"):
        load_progressive(bundle, **argument)


def test_a_misspelt_start_is_an_error(bundle: Path) -> None:
    with pytest.raises(LoadError, match="bad argument of load: steady_after='later'"):
        load_progressive(bundle, steady_after="later")  # type: ignore[arg-type]


def test_closed_it_runs_no_more(bundle: Path) -> None:
    session = load_progressive(bundle)
    binding = bind(session)
    session.close()
    session.close()
    for use in (
        lambda: answer(session),
        lambda: session.run_with_iobinding(binding),
        session.io_binding,
        session.get_inputs,
        session.wait_steady,
    ):
        with pytest.raises(LoadError, match="session is closed"):
            use()


def test_closing_ends_a_build_that_is_under_way(chain: Path) -> None:
    session = load_progressive(chain, steady_after="now")
    # Lets it begin at once; a machine that was busy elsewhere may have seen it end already.
    with contextlib.suppress(LoadTimeoutError):
        session.wait_steady(0)
    session.close()
    assert building_threads() == []
    assert session.error is None


def test_one_that_nobody_holds_any_more_ends_its_build(chain: Path, sessions: list[Any]) -> None:
    session = load_progressive(chain, steady_after="now")
    first = sessions[0]
    del session
    gc.collect()
    assert first() is None
    # One that is not started yet cannot be joined.
    wait_for(lambda: not building_threads(), what="its build ends")
    assert [one() for one in sessions] == [None] * len(sessions)


EXIT = """
import sys
from ortprep.errors import LoadTimeoutError
from ortprep.runtime import load_progressive

session = load_progressive(sys.argv[1], steady_after="now")
try:
    session.wait_steady(float(sys.argv[2]))
except LoadTimeoutError:
    pass
print(session.phase, flush=True)
if sys.argv[3] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [0, 0.1])
@pytest.mark.parametrize(("end", "code"), [("return", 0), ("raise", 3)])
def test_an_interpreter_that_ends_during_a_build_neither_hangs_nor_crashes(
    chain: Path, wait_s: float, end: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", EXIT, str(chain), str(wait_s), end],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.strip() in ("first", "steady")


def test_a_first_phase_is_read_as_it_was_written(bundle: Path) -> None:
    (variant,) = read_loader_config(bundle).variants
    assert variant.first_phase is not None
    assert variant.first_phase.session_options == FIRST
    assert variant.first_phase.providers == variant.providers
