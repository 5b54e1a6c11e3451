"""Records the sessions of an application's process: `ortprep adopt` runs the application with this.

The application gets sessions of a real subclass of `InferenceSession` that answer as before. What goes wrong
in here never reaches the application.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ortprep.bundle.atomic import write_bytes_atomic
from ortprep.bundle.codec import MAX_JSON_BYTES, check_json_values, encode, format_json
from ortprep.bundle.digest import PREFIX, digest_bytes
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import BundleError
from ortprep.runtime.dropin.installation import put_in_place
from ortprep.runtime.dropin.observation import (
    MAX_FEEDS,
    MAX_MODELS,
    FeedObserver,
    ModelRecord,
    ProcessRecord,
)
from ortprep.runtime.dropin.session_request import SessionRequest, find_obstacle, watch_options
from ortprep.runtime.loading.caller_options import split_options
from ortprep.runtime.loading.session import PLAIN_CLASS, import_onnxruntime

log = logging.getLogger(__name__)

RECORDS_VARIABLE = "ORTPREP_RECORDS"
"""Folder that processes write their records to."""

MAX_SAVED_BYTES = 4 * 2**30
"""Maximum size of all models that one process was given as bytes and that are kept."""

_WRITE_INTERVAL_S = 1.0
_MAX_COPIED = 2**20  # elements of a value on the CPU that is copied to be looked at


class _ModelCounter:
    """Sessions of one model with the same options."""

    def __init__(self, model: ModelRecord) -> None:
        self.model = model
        self.loads = 0
        self.feeds = FeedObserver()

    def observed(self) -> ModelRecord:
        model, feeds = self.model, self.feeds
        values = {name: getattr(model, name) for name in model.__dataclass_fields__}
        values |= {"loads": self.loads, "runs": feeds.runs}
        return ModelRecord(**values | {"feeds": feeds.observed(), "other_limits": feeds.other_limits()})


class Recorder:
    """Writes what one process does with its models into a file of its own.

    The file is replaced as a whole when a session was made, at the first run of a model, and at most every
    second while sessions run.

    Args:
        folder: Where records and models given as bytes go; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._restart()

    def write_at_exit(self) -> None:
        """Has the record written when the process ends, also by SIGTERM unless the application handles that.

        A process that is forked from this one begins a record of its own.
        """
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._restart)
        if threading.current_thread() is threading.main_thread():
            _call_at_sigterm(self.end)

    def _restart(self) -> None:
        # Reentrant, since a signal's handler runs in the midst of anything the main thread does.
        self._lock = threading.RLock()
        self._file = self._folder / f"{os.getpid()}-{os.urandom(8).hex()}.json"
        self._models: dict[str, _ModelCounter] = {}
        self._saved: dict[str, int] = {}
        self._lost = 0
        self._written_s = 0.0
        self._is_changed = self._is_finalized = self._is_ended = False

    def opened(self, session: Any, request: SessionRequest) -> FeedObserver | None:
        """Records a session that was just made, and returns the observer of its runs."""
        with self._lock:
            model = self._describe(session, request)
            key = repr(model)
            if key not in self._models and len(self._models) == MAX_MODELS:
                self._lost += 1
                return None
            counter = self._models.setdefault(key, _ModelCounter(model))
            counter.loads += 1
            self._is_changed = True
            self._finalize_with_multiprocessing()
            self.write()
            return counter.feeds

    def ran(self, feeds: FeedObserver, feed: Mapping[str, Any], run_s: float) -> None:
        """Records a run that took `run_s` seconds; `feed` as ONNX Runtime takes it."""
        begun_s = time.perf_counter()
        with self._lock:
            feeds.run_s += run_s
            feeds.add(dict(_normalise(feed)))
            self._is_changed = True
            if feeds.runs == 1 or time.monotonic() - self._written_s > _WRITE_INTERVAL_S:
                self.write()
            feeds.spent_s += time.perf_counter() - begun_s

    def end(self) -> None:
        """Writes the record of a process that is about to end."""
        with self._lock:
            self._is_ended, self._is_changed = True, bool(self._models)
            self.write()

    def write(self) -> None:
        """Writes the record, if anything was recorded since it was written last."""
        with self._lock, _nothing_raised():
            if not self._is_changed:
                return
            record = ProcessRecord(
                pid=os.getpid(),
                program=_name_program(),
                onnxruntime=sys.modules["onnxruntime"].__version__,
                models=tuple(counter.observed() for counter in self._models.values()),
                lost=self._lost,
                ended=self._is_ended,
            )
            # Nobody reads it after a power cut, so it need not wait for the disk.
            write_bytes_atomic(self._file, _format_within_limits(record), durable=False)
            self._written_s, self._is_changed = time.monotonic(), False

    def _describe(self, session: Any, request: SessionRequest) -> ModelRecord:
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
        attributes, entries = ({}, {}) if options is None else split_options(options)
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
            loads=0,
            runs=0,
        )

    def _save(self, model: bytes) -> str | None:
        digest = digest_bytes(model)
        name = f"{digest.removeprefix(PREFIX)}.onnx"
        if digest not in self._saved:
            if sum(self._saved.values()) + len(model) > MAX_SAVED_BYTES:
                return None
            if not (self._folder / name).exists():
                write_bytes_atomic(self._folder / name, model, durable=False)
            self._saved[digest] = len(model)
        return name

    def _finalize_with_multiprocessing(self) -> None:
        """Has the record of a process of `multiprocessing` written, which calls no `atexit` functions."""
        util = sys.modules.get("multiprocessing.util")
        process = sys.modules.get("multiprocessing.process")
        if self._is_finalized or util is None or process is None or process.parent_process() is None:
            return
        util.Finalize(None, self.end, exitpriority=0)
        self._is_finalized = True


def record_in(onnxruntime: Any) -> None:
    """Makes a process record its sessions, in the folder that the environment names.

    Args:
        onnxruntime: The module, just imported: `ortprep.runtime.dropin.import_hook` calls this with it.
    """
    with _nothing_raised():
        recorder = Recorder(Path(os.environ[RECORDS_VARIABLE]))
        recorder.write_at_exit()
        watch_options(onnxruntime)
        put_in_place(onnxruntime, recording_class(onnxruntime.InferenceSession, recorder))
        binding = binding_class(onnxruntime.IOBinding)
        modules: tuple[Any, ...] = (onnxruntime, sys.modules[binding.__module__])
        for module in modules:
            module.IOBinding = binding


def recording_class(base: type[Any], recorder: Recorder) -> type[Any]:
    """Returns a subclass of `onnxruntime.InferenceSession` that records what is done with its sessions.

    Args:
        base: ONNX Runtime's class.
        recorder: Where the record goes.
    """

    class InferenceSession(base):  # type: ignore[misc]
        _ortprep_feeds: FeedObserver | None = None

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
                self._ortprep_feeds = recorder.opened(self, request)

        def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
            with self._recorded(input_feed):
                return super().run(output_names, input_feed, run_options)

        def run_async(self, output_names: Any, input_feed: Any, *rest: Any, **options: Any) -> None:
            with self._recorded(input_feed):
                super().run_async(output_names, input_feed, *rest, **options)

        def run_with_ort_values(self, output_names: Any, feed: Any, run_options: Any = None) -> Any:
            with self._recorded(feed):
                return super().run_with_ort_values(output_names, feed, run_options)

        def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
            with self._recorded(getattr(iobinding, "_ortprep_bound", {})):
                super().run_with_iobinding(iobinding, run_options)

        @contextmanager
        def _recorded(self, feed: Any) -> Iterator[None]:
            begun_s = time.perf_counter()
            yield
            run_s = time.perf_counter() - begun_s
            if self._ortprep_feeds is not None:
                with _nothing_raised():
                    recorder.ran(self._ortprep_feeds, feed, run_s)

    # What this package makes itself, as for an application that loads bundles, is not the application's.
    setattr(InferenceSession, PLAIN_CLASS, base)
    return _described_as(base, InferenceSession)


def binding_class(base: type[Any]) -> type[Any]:
    """Returns a subclass of `onnxruntime.IOBinding` that remembers what the inputs are bound to."""

    class IOBinding(base):  # type: ignore[misc]
        def __init__(self, session: Any) -> None:
            super().__init__(session)
            self._ortprep_bound: dict[str, Any] = {}

        def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
            super().bind_cpu_input(name, arr_on_cpu)
            # ONNX Runtime's own class holds the array as well, as long as it is bound.
            self._ortprep_bound[name] = arr_on_cpu

        def bind_input(
            self, name: str, device_type: Any, device_id: Any, element_type: Any, shape: Any, buffer_ptr: Any
        ) -> None:
            super().bind_input(name, device_type, device_id, element_type, shape, buffer_ptr)
            self._ortprep_bound[name] = _Shape(shape)

        def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
            super().bind_ortvalue_input(name, ortvalue)
            self._ortprep_bound[name] = _Shape(ortvalue.shape())

        def clear_binding_inputs(self) -> None:
            super().clear_binding_inputs()
            self._ortprep_bound.clear()

    return _described_as(base, IOBinding)


def _described_as(base: type[Any], replacement: type[Any]) -> type[Any]:
    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(replacement, name, getattr(base, name))
    return replacement


class _Shape(tuple[int, ...]):
    """Shape of a value that cannot be looked at."""


def _normalise(feed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields arrays, or shapes where a value lies on a device; what is no tensor is left out."""
    for name, value in feed.items():
        if isinstance(value, np.ndarray | _Shape):
            yield name, value
        elif callable(getattr(value, "data_type", None)):
            if value.is_tensor():
                yield name, _look_at(value)
        elif isinstance(value, list | tuple | int | float | str | np.generic):
            with suppress(ValueError):  # arrays of several shapes: a sequence
                yield name, np.asarray(value)


def _look_at(value: Any) -> Any:
    """Returns an `OrtValue` as an array if that is cheap, else its shape."""
    shape = _Shape(value.shape())
    return value.numpy() if value.device_name() == "cpu" and math.prod(shape) <= _MAX_COPIED else shape


def _read_providers(providers: Any, options: Any) -> tuple[ProviderRecord, ...]:
    """Returns the providers in either of the forms that ONNX Runtime takes."""
    records = []
    for index, entry in enumerate(providers or ()):
        name, chosen = (
            entry if isinstance(entry, tuple | list) else (entry, options[index] if options else {})
        )
        records.append(ProviderRecord(str(name), {str(key): str(value) for key, value in chosen.items()}))
    return tuple(records)


def _format_within_limits(record: ProcessRecord) -> bytes:
    """Returns a record as JSON that `read_json` reads; sets of shapes beyond its limits are only counted."""
    for max_feeds in (MAX_FEEDS, MAX_FEEDS // 8, 1, 0):
        models = tuple(replace(model, feeds=model.feeds[:max_feeds]) for model in record.models)
        content = format_json(encode(replace(record, models=models)))
        with suppress(BundleError):
            check_json_values(content, name="record")
            if len(content) <= MAX_JSON_BYTES:
                break
    return content


def _name_program() -> str:
    """Returns the names of the interpreter and of its script or module; their arguments may be secrets."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    script = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    main = script if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    return f"{os.path.basename(sys.executable or 'python')} {main}".rstrip()


@contextmanager
def _nothing_raised() -> Iterator[None]:
    try:
        yield
    except Exception:  # whatever it is, the application must not notice
        log.debug("not recorded", exc_info=True)


def _call_at_sigterm(function: Callable[[], None]) -> None:
    """Calls a function when this process is about to end by SIGTERM."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def end(number: int, _frame: object) -> None:
        function()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
