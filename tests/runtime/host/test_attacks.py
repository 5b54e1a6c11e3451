"""What another user, or a program that breaks the protocol, can do to a host and to its clients: nothing."""

import _thread
import json
import os
import shutil
import signal
import socket
import struct
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.errors import HostDiedError, HostError, LoadTimeoutError, RequestTimeoutError
from ortprep.runtime import connect
from ortprep.runtime.descriptors import close_aside
from ortprep.runtime.host import client, models, process
from ortprep.runtime.host.folder import HostFolder, require_same_user
from ortprep.runtime.host.models import HostConfig, ModelTable
from ortprep.runtime.host.process import read_status
from ortprep.runtime.loading import phases
from ortprep.runtime.loading.load_options import Deadline
from ortprep.runtime.packets import (
    DONE,
    FAILED,
    MAX_PACKET_BYTES,
    OPEN,
    OPENED,
    RUN,
    receive,
    send,
    send_arrays,
)
from tests.fakes import lingering, wait_for
from tests.runtime.builders import (
    assert_answers,
    endless_model,
    rewrite_digests,
    sample,
    weights_of,
    write_bundle,
)
from tests.runtime.host.conftest import freeze_host, host_in_this_process, kill_host

pytestmark = [pytest.mark.runtime, pytest.mark.attack]

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")


@contextmanager
def connection(model=None):
    """A client by hand, which has opened a model if one is given."""
    folder = HostFolder()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(f"{folder.path}/socket")
        folder.close()
        sock.settimeout(10)
        if model is not None:
            send(sock, OPEN, bytes(model))
            opened = receive(sock, "host")
            assert opened.kind == OPENED
        yield sock


def is_closed_with_an_error(sock):
    """Says whether the host answers with an error or not at all, and closes the connection."""
    with suppress(ConnectionError):
        packet = receive(sock, "host")
        if packet is not None:
            assert (packet.kind, json.loads(packet.text)["kind"]) == (FAILED, "HostError")
            return receive(sock, "host") is None
    return True


def head(kind, arrays=0, text=0, magic=b"ortprep4"):
    return struct.pack("<8sBxHIqQI", magic, kind, arrays, text, 0, 0, 0)


def place(name, dtype, shape, rank=None):
    ranks = len(shape) if rank is None else rank
    names = struct.pack("<HB", len(name), len(dtype)) + name + dtype
    return names + struct.pack(f"<B{len(shape)}Q", ranks, *shape)


def request(*places, data=b"", count=None):
    text = b"".join(places)
    return head(RUN, len(places) if count is None else count, len(text)) + text + data


X = place(b"x", b"float32", (1, 8))
JUNK = {
    "noise": os.urandom(500),
    "one byte": b"o",
    "another magic": head(OPEN, magic=b"ortprep9"),
    "half a head": head(OPEN)[:20],
    "a longer text than there is": head(OPEN, text=2**32 - 1),
    "an unknown kind": head(99),
    "a host's kind": head(DONE),
    "too large a packet": head(OPEN, text=1) + bytes(MAX_PACKET_BYTES),
    "arrays of 8 GiB": request(place(b"x", b"float32", (2**31,)), data=bytes(64)),
    "fewer arrays than it says": request(X, count=60_000),
    "more arrays than it says": request(X, X, count=1),
    "the same name twice": request(X, X, data=bytes(64)),
    "data outside": request(place(b"x", b"float32", (1, 17)), data=bytes(64)),
    "a second array outside": request(X, place(b"y", b"float32", (1, 8)), data=bytes(60)),
    "data behind the arrays": request(X, data=bytes(64)),
    "sizes whose product wraps": request(place(b"x", b"float32", (2**32, 2**32)), data=bytes(64)),
    "a size below zero": request(place(b"x", b"float32", (2**64 - 1,)), data=bytes(64)),
    "255 axes": request(place(b"x", b"float32", (1,) * 8, rank=255), data=bytes(64)),
    "objects": request(place(b"x", b"object", (1,)), data=bytes(64)),
    "a structure": request(place(b"x", b"O,O", (1,)), data=bytes(64)),
    "strings": request(place(b"x", b"U4", (1,)), data=bytes(64)),
    "a boolean that is 2": request(place(b"x", b"bool", (64,)), data=b"\2" * 64),
    "no text": request(place(b"\xff", b"float32", (1, 8)), data=bytes(64)),
    "an empty array of impossible sizes": request(place(b"x", b"float32", (2**63, 2**63, 0))),
}


def test_a_client_that_breaks_the_protocol_is_closed_and_others_are_served(bundle):
    with connect(bundle, start=True) as session:
        for name, packet in JUNK.items():
            with connection(bundle) as sock:
                sock.sendall(packet)
                assert_answers(session)  # half a message may go on
                sock.shutdown(socket.SHUT_WR)
                assert is_closed_with_an_error(sock), name


def test_a_request_before_a_model_and_a_name_that_is_no_path_are_errors(bundle):
    connect(bundle, start=True).close()
    with connection() as sock:
        sock.send(request(X, data=bytes(64)))
        assert is_closed_with_an_error(sock)
    for name in (
        b"",
        b"../linear",
        b"linear",
        b"/a\0b",
        b"/" + b"x" * 60_000,
        b"/proc/self/mem",
        b"/dev/zero",
    ):
        with connection() as sock:
            send(sock, OPEN, name)
            packet = receive(sock, "host")
            assert packet.kind == FAILED


def memory_file():
    return os.memfd_create("attack", os.MFD_CLOEXEC)


def open_null():
    return os.open("/dev/null", os.O_RDONLY)


DESCRIPTORS = {
    "a memory file": (memory_file, 1, request(X, data=bytes(32))),
    "a folder": (lambda: os.open("/", os.O_RDONLY), 1, request(X, data=bytes(32))),
    "an event": (lambda: os.eventfd(0), 1, head(OPEN)),
    "many": (open_null, 30, head(RUN)),
    "two with junk": (open_null, 2, b"junk"),
}


def host_descriptors():
    status = read_status()
    return len(list(Path(f"/proc/{status['pid']}/fd").iterdir()))


def test_descriptors_are_refused_and_closed(bundle):
    with connect(bundle, start=True) as session:
        assert_answers(session)
        before = host_descriptors()
        for name, (make, count, packet) in DESCRIPTORS.items():
            for _ in range(5):
                with connection(bundle) as sock:
                    descriptors = [make() for _ in range(count)]
                    with suppress(OSError):
                        socket.send_fds(sock, [packet], descriptors)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    assert is_closed_with_an_error(sock), name
            # The host closes connections a little later than its clients: at most two were counted.
            wait_for(lambda: host_descriptors() <= before, what=f"no descriptor is left in the host: {name}")
            assert_answers(session)


def test_clients_that_leave_or_do_not_read_stop_nobody(bundle):
    with connect(bundle, start=True) as session:
        idle = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(100)]
        folder = HostFolder()
        for sock in idle:
            sock.connect(f"{folder.path}/socket")
        folder.close()
        for number in range(40):
            with connection(bundle) as sock:
                send_arrays(sock, RUN, {"x": np.zeros((20_000, 8), np.float32)})
                if number % 2:  # requests whose answers nobody reads
                    sock.setblocking(False)
                    with suppress(OSError):
                        for _ in range(1000):
                            sock.send(request(X, data=bytes(64)))
        assert_answers(session)
        for sock in idle:
            sock.close()


def test_more_clients_than_there_is_room_for_are_told_so(bundle):
    with connect(bundle, start=True) as session:
        folder = HostFolder()
        clients = []
        for _ in range(520):
            clients.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            clients[-1].connect(f"{folder.path}/socket")
        folder.close()
        clients[-1].settimeout(10)
        packet = receive(clients[-1], "host")
        assert json.loads(packet.text)["kind"] == "NoRoomError"
        assert session.run(None, {"x": sample()})[0].shape == (2, 4)
        for sock in clients:
            sock.close()


@pytest.mark.parametrize("packets", [[b"junk"], [b"junk", b"junk"]], ids=["first", "behind"])
def test_descriptors_that_linger_stop_nobody(bundle, packets):
    with connect(bundle, start=True, timeout_s=20) as session, lingering(2 * 18) as descriptors:
        pid, clients = freeze_host(), []
        for number in range(18):  # more than the host runs at once
            with connection() as sock:
                clients.append(sock.dup())
                for packet in packets:
                    socket.send_fds(sock, [packet], descriptors[2 * number : 2 * number + 2])
        for descriptor in descriptors:
            os.close(descriptor)  # the host's are the last
        os.kill(pid, signal.SIGCONT)
        for client in clients:
            with client:
                client.settimeout(20)
                assert is_closed_with_an_error(client)
        assert_answers(session)


def test_without_a_thread_to_be_had_descriptors_are_closed_by_the_next(monkeypatch):
    closed = []

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        close_aside(lambda: closed.append(threading.get_ident()))
    assert closed == []
    close_aside(lambda: closed.append(threading.get_ident()))
    wait_for(lambda: len(closed) == 2, what="both are closed")
    assert threading.get_ident() not in closed


class Interruption(BaseException):
    """What a signal's handler raises."""


def interrupt(call, number):
    """Calls something, and raises before that line of the client; returns whether it came to it."""
    passed = 0

    def trace(frame, event, _):
        nonlocal passed
        if frame.f_code.co_filename != client.__file__:
            return None
        passed += event == "line"
        if event == "line" and passed == number:
            raise Interruption
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interruption:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_handler_of_a_signal_may_raise_anywhere_in_a_call(bundle):
    """A lock stayed taken for ever. What was sent before must not be the answer of a later call."""
    with connect(bundle, start=True, timeout_s=20) as session:
        number, x = 1, np.zeros((1, 8), np.float32)
        while interrupt(lambda: session.run(None, {"x": x}), number):
            number += 1
            if number % 3:  # else the next one connects again
                assert_answers(session)
    assert number > 20


@pytest.mark.parametrize("hanging", ["OpenedModel.run", "_read_stamp"])
def test_requests_that_hang_stop_no_other_model(bundle, tmp_path, monkeypatch, hanging):
    """A model that runs without end, a bundle on a file system that does not answer."""
    bad, is_over = write_bundle(tmp_path / "bad", seed=1), threading.Event()
    with host_in_this_process(), connect(bundle) as session, ExitStack() as opened:
        (y,) = session.run(None, {"x": sample()})
        others = [opened.enter_context(connection(bad)) for _ in range(30)]
        usual, hung = attrgetter(hanging)(models), threading.Event()

        def hang_for_bad(*arguments):
            last = arguments[-1]
            if last == str(bad) or (isinstance(last, dict) and len(last["x"]) == 5):
                hung.set()
                assert is_over.wait(60)
            return usual(*arguments)

        monkeypatch.setattr(f"ortprep.runtime.host.models.{hanging}", hang_for_bad)
        for other in others:
            send_arrays(other, RUN, {"x": np.zeros((5, 8), np.float32)})
        assert hung.wait(60)
        for _ in range(3):  # a run waits for a second for those that hang
            np.testing.assert_array_equal(session.run(None, {"x": sample()}, timeout_s=30)[0], y)
        is_over.set()
        for other in others:
            answer = receive(other, "host")
            assert answer.kind == DONE


def write_endless(folder):
    """Writes a bundle of 13 KB whose load takes hours: ONNX Runtime multiplies large constants."""
    bundle = write_bundle(folder, options=SessionOptionsRecord("ORT_ENABLE_ALL"))
    model = bundle / "cpu" / "linear_optimized.onnx"
    model.write_bytes(endless_model(weights_of(0)))
    rewrite_digests(bundle)
    return bundle


@pytest.mark.skipif(not phases.may_swap(), reason="ONNX Runtime before 1.31, or a single core")
def test_a_bundle_that_loads_for_hours_stops_no_model_that_is_loaded(bundle, tmp_path):
    others = [write_bundle(tmp_path / f"other{seed}", seed=seed) for seed in range(18)]
    with connect(bundle, start=True, timeout_s=20) as session, ExitStack() as opened:
        with pytest.raises((RequestTimeoutError, LoadTimeoutError)):
            connect(write_endless(tmp_path / "endless"), timeout_s=2)
        for other in others:  # more than the host runs at once, and all wait for that load
            send(opened.enter_context(connection()), OPEN, bytes(other))
        for _ in range(3):
            (y,) = session.run(None, {"x": sample()})
            np.testing.assert_allclose(y, sample() @ weights_of(0), rtol=1e-5)
        with pytest.raises((RequestTimeoutError, LoadTimeoutError)):
            connect(others[0], timeout_s=0.5)
        kill_host()


def test_a_load_ends_with_the_patience_of_its_client(bundle):
    table = ModelTable(HostConfig())
    with pytest.raises(LoadTimeoutError), table.use(str(bundle), Deadline(0, subject="")):
        pass
    assert table.describe() == []


@contextmanager
def fake_host(*answers):
    """A process at the host's socket that receives packets, and answers each in its own way."""
    folder = HostFolder(make=True)
    listener = socket.socket(fileno=folder.listen().detach())
    listener.settimeout(10)

    def serve():
        with suppress(OSError):
            client, _ = listener.accept()
            with client:
                for answer in answers:
                    client.recv(MAX_PACKET_BYTES)
                    answer(client)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    listener.close()
    thread.join()
    folder.remove_socket()
    folder.close()


def opened(sock):
    send(sock, OPENED, b"{}")


def says(packet):
    return lambda sock: sock.send(packet)


LIES = {
    **{name: says(packet) for name, packet in JUNK.items() if name != "a host's kind"},
    "an answer to another question": opened,
    "an error that is none": lambda sock: send(sock, FAILED, b"[" * 5000),
    "an error that is a list": lambda sock: send(sock, FAILED, b"[1]"),
    "a descriptor": lambda sock: socket.send_fds(sock, [head(DONE)], [sock.fileno()]),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_host_that_breaks_the_protocol_is_an_error(bundle, lie):
    with fake_host(opened, lie):
        session = connect(bundle, timeout_s=5)
        with pytest.raises(HostError, match=r"host (broke the protocol|ended before it answered)"):
            session.run(None, {"x": sample()})
        session.close()


def test_a_host_that_leaves_at_once_is_an_error_and_no_endless_loop(bundle):
    with fake_host(opened, lambda sock: sock.close()):
        session = connect(bundle, timeout_s=5)
        with pytest.raises(HostDiedError, match="before it answered"):
            session.run(None, {"x": sample()})
        session.close()


def link_elsewhere(folder):
    folder.symlink_to(folder.parent / "elsewhere")
    folder.resolve().mkdir(mode=0o700)


def make_folder(folder, mode=0o700, owned=""):
    """Makes a host's folder, or has another user own a part of the way to it."""
    folder.mkdir(mode=0o700)
    folder.chmod(mode)
    if owned:
        os.chown(folder.parent.parent / owned, NOBODY, NOBODY)


UNSAFE = {
    "others may read it": lambda folder: make_folder(folder, 0o755),
    "a group may write it": lambda folder: make_folder(folder, 0o770),
    "others may enter it": lambda folder: make_folder(folder, 0o711),
    "a link": link_elsewhere,
    "a file": lambda folder: folder.touch(),
    "another user's": lambda folder: make_folder(folder, owned="ortprep/host"),
    "in another user's": lambda folder: make_folder(folder, owned="ortprep"),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_a_folder_that_others_could_have_made_or_may_enter_is_refused(bundle, runtime_folder, case):
    if "another user" in case and os.geteuid() != 0:
        pytest.skip("acts as another user")
    runtime_folder.parent.mkdir(mode=0o700)
    UNSAFE[case](runtime_folder)
    for ask in (lambda: connect(bundle), lambda: connect(bundle, start=True), read_status):
        with pytest.raises(HostError, match="not safe to use"):
            ask()
    if runtime_folder.is_dir():
        assert list(runtime_folder.iterdir()) == []
    shutil.rmtree(runtime_folder.parent)


def as_nobody(act):
    """Does something in a process of another user; returns its exit code, 0 if it did not raise."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
        except BaseException:  # noqa: BLE001 - whatever it is, the code says so
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_root
def test_another_user_that_reaches_the_socket_is_not_served(bundle):
    connect(bundle, start=True).close()
    folder = HostFolder()
    opened = os.dup(folder.descriptor)  # a fork closes the folder's own
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def ask():
        connected.connect(f"/proc/self/fd/{opened}/socket")
        send(connected, OPEN, bytes(bundle))
        assert receive(connected, "host") is not None

    try:
        Path(folder.path).chmod(0o711)
        Path(f"{folder.path}/socket").chmod(0o777)
        assert as_nobody(ask) == 1
        assert receive(connected, "host") is None  # closed without a word
        assert as_nobody(lambda: None) == 0
    finally:
        Path(folder.path).chmod(0o700)
        connected.close()
        folder.close()
        os.close(opened)
    with connect(bundle) as session:
        assert session.run(None, {"x": sample()})[0].shape == (2, 4)


@needs_root
def test_a_host_of_another_pid_namespace_is_told_of_and_left_alone(bundle, monkeypatch):
    connect(bundle, start=True).close()
    with monkeypatch.context() as patch:
        patch.setattr(process, "require_same_user", lambda _: 0)  # what SO_PEERCRED gives there
        with pytest.raises(HostError, match="another PID namespace"):
            process.stop_host()
    assert read_status() is not None


def test_a_host_of_another_user_is_not_asked(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        assert as_nobody(lambda: listener.listen()) == 0  # who listens is who the system names
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(path))
            with pytest.raises(HostError, match="another user's"):
                require_same_user(sock)
