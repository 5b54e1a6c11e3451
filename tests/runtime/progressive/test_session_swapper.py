"""Laws of who serves; sessions are plain objects and builds wait for the test."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from ortprep.errors import IntegrityError, LoadError, LoadTimeoutError
from ortprep.runtime.loading.load_options import Cancellation
from ortprep.runtime.progressive.swapper import SessionSwapper
from tests.fakes import wait_for

pytestmark = pytest.mark.runtime

PATIENCE_S = 300.0
"""How long a test waits for what must happen; passing takes no time."""


class Session:
    """What is served."""


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "ortprep-steady":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def serve(
    build: Callable[[Cancellation], Session] | None, first: Session | None = None
) -> SessionSwapper[Session]:
    return SessionSwapper(first or Session(), build, name="m")


class HeldBuild:
    """A build that lasts until the test lets it go on, or until it is cancelled."""

    def __init__(self) -> None:
        self.session = Session()
        self.began = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, cancellation: Cancellation) -> Session:
        options = Options(self.go_on)
        cancellation.cover(options)
        self.began.set()
        assert self.go_on.wait(PATIENCE_S)
        if options.cancelled:
            raise LoadError("load was cancelled")
        return self.session


class Options:
    """The part of `onnxruntime.SessionOptions` that stops a load."""

    def __init__(self, woken: threading.Event) -> None:
        self.cancelled = False
        self._woken = woken

    def set_load_cancellation_flag(self, flag: bool) -> None:
        self.cancelled = flag
        self._woken.set()


def test_without_anything_to_build_it_is_steady_from_the_start() -> None:
    first = Session()
    only = serve(None, first)
    only.start()
    only.wait(0)
    assert (only.phase, only.error, only.current()) == ("steady", None, first)


def test_nothing_is_built_until_it_is_started() -> None:
    build = HeldBuild()
    waiting = serve(build)
    assert waiting.phase == "first"
    assert not [thread for thread in threading.enumerate() if thread.name == "ortprep-steady"]
    waiting.close()
    waiting.start()
    assert not build.began.is_set()


def test_the_first_serves_while_the_steady_one_is_built_and_not_after() -> None:
    build, first = HeldBuild(), Session()
    served = serve(build, first)
    served.start()
    assert build.began.wait(PATIENCE_S)
    assert (served.phase, served.current()) == ("first", first)
    build.go_on.set()
    served.wait(PATIENCE_S)
    assert (served.phase, served.current()) == ("steady", build.session)


def test_it_is_built_once_however_many_start_it() -> None:
    built = []

    def build(cancellation: Cancellation) -> Session:
        built.append(Session())
        return built[-1]

    served = serve(build)
    starters = [threading.Thread(target=served.start) for _ in range(16)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    served.wait(PATIENCE_S)
    served.start()
    served.wait(PATIENCE_S)
    assert len(built) == 1


def test_waiting_has_it_built_so_that_nobody_waits_for_ever() -> None:
    served = serve(lambda cancellation: Session())
    served.wait()
    assert served.phase == "steady"


def test_waiting_ends_in_time_and_the_build_goes_on() -> None:
    build = HeldBuild()
    served = serve(build)
    with pytest.raises(LoadTimeoutError, match=r"not in service yet: m\n  expected it within 0 s"):
        served.wait(0)
    build.go_on.set()
    served.wait(PATIENCE_S)
    assert served.current() is build.session


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_a_time_to_wait_that_is_none_is_an_error(timeout_s: float) -> None:
    with pytest.raises(LoadError, match="bad argument of wait_steady: timeout_s"):
        serve(None).wait(timeout_s)


def test_a_build_that_fails_leaves_the_first_in_service_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def build(cancellation: Cancellation) -> Session:
        raise IntegrityError("files changed: weights\n  expected a, got b", hint="ortprep check m")

    first = Session()
    served = serve(build, first)
    for _ in range(2):
        with pytest.raises(IntegrityError, match="files changed: weights") as caught:
            served.wait(PATIENCE_S)
        assert caught.value.hint == "ortprep check m"
    assert (served.phase, served.current()) == ("failed", first)
    assert isinstance(served.error, IntegrityError)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = "m: the first session stays in service: files changed: weights | expected a, got b"
    assert record.getMessage() == message


def test_an_error_that_nobody_foresaw_is_a_load_error() -> None:
    def build(cancellation: Cancellation) -> Session:
        raise MemoryError("too much")

    served = serve(build)
    with pytest.raises(LoadError, match="MemoryError: too much"):
        served.wait(PATIENCE_S)
    assert served.phase == "failed"


def test_a_thread_that_cannot_be_started_costs_the_caller_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    served = serve(lambda cancellation: Session())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        served.start()
        with pytest.raises(LoadError, match="can't start new thread"):
            served.wait(PATIENCE_S)
    assert (served.phase, bool(served.current())) == ("failed", True)
    served.close()


def test_an_exchanged_session_lives_as_long_as_someone_uses_it() -> None:
    first = Session()
    seen = weakref.ref(first)
    served = serve(lambda cancellation: Session(), first)
    del first
    in_use = served.current()
    served.wait(PATIENCE_S)
    assert seen() is in_use
    del in_use
    assert seen() is None


def test_a_session_found_wanting_is_not_kept_by_its_error() -> None:
    seen: list[weakref.ref[Session]] = []

    def build(cancellation: Cancellation) -> Session:
        session = Session()
        seen.append(weakref.ref(session))
        raise LoadError("wrong answer")

    served = serve(build)
    with pytest.raises(LoadError, match="wrong answer"):
        served.wait(PATIENCE_S)
    served.give_up()
    assert seen[0]() is None


def test_closing_cancels_the_build_and_waits_for_its_end(caplog: pytest.LogCaptureFixture) -> None:
    build = HeldBuild()
    served = serve(build)
    served.start()
    assert build.began.wait(PATIENCE_S)
    served.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ortprep-steady"]
    for use in (served.current, served.wait):
        with pytest.raises(LoadError, match="session is closed: m"):
            use()
    served.close()
    served.start()
    assert caplog.records == []


def test_closing_wakes_those_who_wait() -> None:
    build = HeldBuild()
    served = serve(build)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            served.wait(PATIENCE_S)
        except LoadError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert build.began.wait(PATIENCE_S)
    served.close()
    waiter.join(PATIENCE_S)
    assert [str(error).partition("\n")[0] for error in errors] == ["session is closed: m"]


def test_a_session_that_is_built_after_closing_never_serves() -> None:
    began, go_on = threading.Event(), threading.Event()

    def deaf_build(cancellation: Cancellation) -> Session:
        began.set()
        assert go_on.wait(PATIENCE_S)
        return Session()

    served = serve(deaf_build)
    served.start()
    assert began.wait(PATIENCE_S)
    closer = threading.Thread(target=served.close)
    closer.start()
    go_on.set()
    closer.join(PATIENCE_S)
    with pytest.raises(LoadError, match="closed"):
        served.current()


def test_abandoned_it_lets_go_of_everything() -> None:
    first, build = Session(), HeldBuild()
    seen = weakref.ref(first)
    served = serve(build, first)
    del first
    served.start()
    assert build.began.wait(PATIENCE_S)
    served.abandon()
    assert build.go_on.is_set(), "the build must have been cancelled"
    del served
    wait_for(lambda: gc.collect() >= 0 and seen() is None, what="the first session is freed")


def test_a_cancellation_reaches_a_load_that_begins_later() -> None:
    cancellation, options = Cancellation(), Options(threading.Event())
    cancellation.request()
    cancellation.cover(options)
    assert (cancellation.requested, options.cancelled) == (True, True)
