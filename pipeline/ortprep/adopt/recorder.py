"""Records the sessions of an application's process: `ortprep adopt` runs the application with this.

The application gets sessions of a real subclass of `InferenceSession` that answer as before. What goes wrong
in here never reaches the application.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ortprep.adopt.observation import (
    InputKeeper,
    ModelObserver,
    ModelRecord,
    ProcessRecord,
)
from ortprep.bundle.atomic import write_bytes_atomic
from ortprep.bundle.codec import decode, encode, format_json, read_json
from ortprep.bundle.digest import PREFIX, digest_bytes
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import BundleError, LaunchError, PipelineError, ProgramNotFoundError, SpecError
from ortprep.runtime.dropin.import_hook import startup_environment
from ortprep.runtime.dropin.session import put_in_place
from ortprep.runtime.dropin.session_request import SessionRequest, find_obstacle
from ortprep.runtime.loading.caller_options import read_options, split_options, watch_options
from ortprep.runtime.loading.session import PLAIN_CLASS, described_as, import_onnxruntime
from ortprep.runtime.tensors.element_types import numpy_dtype

log = logging.getLogger(__name__)

RECORDS_VARIABLE = "ORTPREP_RECORDS"
"""Folder that processes write their records to."""

INPUTS_VARIABLE = "ORTPREP_RECORD_INPUTS"
"""How many real inputs of each model a process keeps beside its record; none if it is not set."""


class Recorder:
    """Writes what one process does with its models into a file of its own.

    The file is replaced as a whole when there is something new: a session, a set of shapes, twice as many
    runs of a model, the end of the process. A process that is killed, or that ends without Python's exit
    functions, leaves out its last runs, at most half of them.

    Args:
        folder: Where records, models given as bytes and inputs go; it exists.
        max_inputs: Number of inputs to keep of each model.
    """

    def __init__(self, folder: Path, *, max_inputs: int = 0) -> None:
        self._folder, self._limit = folder, max_inputs
        self._models: dict[str, ModelObserver] = {}
        self._restart()

    def start(self) -> None:
        """Has the record written at the end of the process; a process forked from it starts its own."""
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._restart)

    def _restart(self) -> None:
        """Begins a record; sessions from before a fork go on with their observers, which begin again."""
        self._lock = threading.RLock()  # a signal's handler may run sessions in the middle of anything
        self._file = self._folder / f"{os.getpid()}-{os.urandom(8).hex()}.json"
        for number, observer in enumerate(self._models.values()):
            observer.restart(self._new_keeper(number))

    def _new_keeper(self, model: int) -> InputKeeper | None:
        return InputKeeper(self._folder, f"{self._file.stem}-{model}", self._limit) if self._limit else None

    def opened(self, session: Any, request: SessionRequest) -> ModelObserver:
        """Records a session that was just made, and returns the observer of its runs."""
        with self._lock:
            model = self._describe(session, request)
            key = repr(model)
            if key not in self._models:
                self._models[key] = ModelObserver(model, self._new_keeper(len(self._models)))
            observer = self._models[key]
            observer.loads += 1
            self.write()
            return observer

    def ran(self, observer: ModelObserver, feed: Mapping[str, Any]) -> None:
        """Records a run; `feed` as ONNX Runtime takes it."""
        with self._lock:
            arrays = dict(_normalise(feed, observer.inputs))
            is_new = observer.add(arrays)
            if observer.keeper is not None and len(arrays) == len(feed):
                observer.keeper.add(arrays)
            if is_new or observer.runs & (observer.runs - 1) == 0:
                self.write()

    def end(self) -> None:
        """Writes the record of a process that is about to end."""
        with _nothing_raised():
            self.write()

    def write(self) -> None:
        """Writes the record of a process that has made or run a session."""
        with self._lock:
            used = tuple([one.observed() for one in self._models.values() if one.loads or one.runs])
            if used:
                record = ProcessRecord(sys.modules["onnxruntime"].__version__, used)
                # Nobody reads it after a power cut, so it need not wait for the disk.
                write_bytes_atomic(self._file, format_json(encode(record)), durable=False)

    def _describe(self, session: Any, request: SessionRequest) -> ModelRecord:
        """Returns the record of a model, which is saved first where it came as bytes."""
        path = saved = None
        size_bytes = modified_ns = 0
        if isinstance(request.model, bytes):
            size_bytes, saved = len(request.model), self._save(request.model)
        else:
            path = os.path.abspath(os.fsdecode(request.model))
            with suppress(OSError):
                status = os.stat(path)
                size_bytes, modified_ns = status.st_size, status.st_mtime_ns
        options = request.options
        attributes, entries = ({}, {}) if options is None else split_options(read_options(options))
        level = "ORT_ENABLE_ALL" if options is None else options.graph_optimization_level.name
        return ModelRecord(
            path=path,
            saved=saved,
            size_bytes=size_bytes,
            modified_ns=modified_ns,
            options=SessionOptionsRecord(level, attributes, entries),
            providers=_read_providers(request.providers, request.provider_options),
            obtained=tuple(session.get_providers()),
            obstacle=find_obstacle(request, import_onnxruntime()),
            inputs={value.name: value.type for value in session.get_inputs()},
        )

    def _save(self, model: bytes) -> str:
        """Keeps a model given as bytes, and returns the name of its file."""
        name = f"{digest_bytes(model).removeprefix(PREFIX)}.onnx"
        if not (self._folder / name).exists():
            write_bytes_atomic(self._folder / name, model, durable=False)
        return name


def record_in(onnxruntime: Any) -> None:
    """Makes a process record its sessions, in the folder that the environment names.

    Args:
        onnxruntime: The module, just imported: `ortprep.runtime.dropin.import_hook` calls this with it.
    """
    with _nothing_raised():
        limit = int(os.environ.get(INPUTS_VARIABLE, 0))
        recorder = Recorder(Path(os.environ[RECORDS_VARIABLE]), max_inputs=limit)
        recorder.start()
        watch_options(onnxruntime)
        put_in_place(onnxruntime, recording_class(onnxruntime.InferenceSession, recorder))


def recording_class(base: type[Any], recorder: Recorder) -> type[Any]:
    """Returns a subclass of `onnxruntime.InferenceSession` that records what is done with its sessions.

    Args:
        base: ONNX Runtime's class.
        recorder: Where the record goes.
    """

    class InferenceSession(base):  # type: ignore[misc]
        _ortprep_observer: ModelObserver | None = None

        def __init__(
            self,
            path_or_bytes: Any,
            sess_options: Any = None,
            providers: Any = None,
            provider_options: Any = None,
            **kwargs: Any,
        ) -> None:
            super().__init__(path_or_bytes, sess_options, providers, provider_options, **kwargs)
            request = SessionRequest(path_or_bytes, sess_options, providers, provider_options, kwargs)
            with _nothing_raised():
                self._ortprep_observer = recorder.opened(self, request)

        def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
            return self._ortprep_ran(input_feed, super().run(output_names, input_feed, run_options))

        def run_async(self, output_names: Any, input_feed: Any, *rest: Any, **options: Any) -> None:
            super().run_async(output_names, input_feed, *rest, **options)
            self._ortprep_ran(input_feed)

        def run_with_ort_values(self, output_names: Any, feed: Any, run_options: Any = None) -> Any:
            return self._ortprep_ran(feed, super().run_with_ort_values(output_names, feed, run_options))

        def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
            super().run_with_iobinding(iobinding, run_options)
            self._ortprep_ran({})  # what inputs are bound to may lie on a device

        def _ortprep_ran(self, feed: Any, outputs: Any = None) -> Any:
            if self._ortprep_observer is not None:
                with _nothing_raised():
                    recorder.ran(self._ortprep_observer, feed)
            return outputs

    # What this package makes itself, as for an application that loads bundles, is not the application's.
    setattr(InferenceSession, PLAIN_CLASS, base)
    return described_as(base, InferenceSession)


def _normalise(feed: Mapping[str, Any], types: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yields arrays; what is no array, or may lie on a device as an `OrtValue` may, is left out.

    Numbers and lists become arrays of the input's type, as ONNX Runtime makes them.
    """
    for name, value in feed.items():
        if isinstance(value, np.ndarray):
            yield name, value
        elif isinstance(value, list | tuple | int | float | str | np.generic):
            # What is no array is left out: a sequence, say, whose arrays have several shapes.
            with suppress(PipelineError, OverflowError, TypeError, ValueError):
                element_type = types.get(name, "").removeprefix("tensor(").removesuffix(")")
                yield name, np.asarray(value, numpy_dtype(element_type))


def _read_providers(providers: Any, options: Any) -> tuple[ProviderRecord, ...]:
    """Returns the providers in either of the forms that ONNX Runtime takes."""
    records = []
    for index, entry in enumerate(providers or ()):
        name, chosen = (
            entry if isinstance(entry, tuple | list) else (entry, options[index] if options else {})
        )
        records.append(ProviderRecord(str(name), {str(key): str(value) for key, value in chosen.items()}))
    return tuple(records)


@contextmanager
def _nothing_raised() -> Iterator[None]:
    try:
        yield
    except Exception:  # whatever it is, the application must not notice
        log.debug("not recorded", exc_info=True)


_RECORDER = "ortprep.adopt.recorder:record_in"


def run_recorded(command: Sequence[str], records: Path, *, max_inputs: int = 0) -> int:
    """Runs a command to its end and returns its exit code, as a shell reports it.

    The command has this process's streams. Ctrl-C reaches it, and this process waits for it.

    Args:
        command: Program and arguments.
        records: Folder for the records of its Python processes.
        max_inputs: Number of real inputs that each process keeps of each model, in that folder.

    Raises:
        ProgramNotFoundError: There is no such program.
        LaunchError: It cannot be run.
    """
    own = {RECORDS_VARIABLE: str(records), INPUTS_VARIABLE: str(max_inputs)}
    environment = startup_environment(_RECORDER, {**os.environ, **own})
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        kind = ProgramNotFoundError if isinstance(error, FileNotFoundError) else LaunchError
        raise kind(f"cannot run {command[0]}: {error.strerror}") from error
    with _signals_passed_to(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _signals_passed_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Passes on signals that end a process; a terminal sends its SIGINT to both already."""

    def pass_on(number: int, _frame: object) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, pass_on) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def read_records(folder: Path, say: Callable[[str], None]) -> tuple[ProcessRecord, ...]:
    """Returns the records of all processes, the oldest file first, without those that cannot be read.

    Args:
        folder: Where they are.
        say: Told which record cannot be read, and why.

    Raises:
        SpecError: There is none, or none that can be read.
    """
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        raise SpecError(
            "the program created no ONNX Runtime session\n"
            "  expected a Python process, 3.11 or newer, that imports onnxruntime, got none",
            hint="python's options -E, -I and -S disable the recorder; run the program without them",
        )
    records = []
    for path in files:
        try:
            records.append(decode(ProcessRecord, read_json(path)))
        except BundleError as error:
            say(f"skipped the record of a process: {error.message}")
    if not records:
        raise SpecError(f"no record can be read\n  expected one of {len(files)}, got none")
    return tuple(records)
