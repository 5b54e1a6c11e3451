"""The models of the host: loaded when they are first asked for, and dropped when memory is short."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.file_memory import find_stamp
from ortprep.errors import LoadError, propose
from ortprep.runtime.loading.bundle_loader import open_bundle
from ortprep.runtime.loading.load_options import Deadline
from ortprep.runtime.machine.memory import private_bytes
from ortprep.runtime.opened_model import OpenedModel

if TYPE_CHECKING:
    from ortprep.runtime.loading.load_options import DigestPolicy


@dataclass(frozen=True)
class HostConfig:
    """Settings of the host.

    Attributes:
        models: Absolute paths of bundles, by the names that clients may use for them.
        idle_s: Seconds without a request after which the host ends; None for never.
        max_memory_bytes: Private memory above which models are dropped; None for any.
        digests: Argument of `load` for every model; so are `precision` and `require_signature`.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    idle_s: float | None = None
    max_memory_bytes: int | None = None
    digests: DigestPolicy = "changed"
    precision: str = "fastest-within-gate"
    require_signature: str | None = None


@dataclass(slots=True, eq=False)
class _Entry:
    """A model that was asked for.

    Attributes:
        loaded: The model, and the stamp of the bundle that it was loaded from.
        users: Number of threads that have it; it is not dropped meanwhile.
        used_s: Time of its last use, by `time.monotonic()`.
        lock: Held while it is loaded.
    """

    loaded: tuple[tuple[int, ...], OpenedModel] | None = None
    users: int = 0
    used_s: float = 0.0
    lock: _thread.RLock = field(default_factory=_thread.RLock)


class ModelTable:
    """The models that are loaded, by their folders, which are no links."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def find_folder(self, model: str) -> str:
        """Returns the folder of a model; raises `LoadError` for what is neither a known name nor absolute."""
        path = self._config.models.get(model, model)
        if path.startswith("/"):
            return os.path.realpath(path)
        known = propose(model, self._config.models)
        problem = f"host has no model of this name: {model!r}\n  {known}, or a folder"
        raise LoadError(problem, hint='connect("/path/of/the/bundle")')

    @contextlib.contextmanager
    def use(self, model: str, load_by: Deadline) -> Iterator[OpenedModel]:
        """Yields a model, which stays loaded meanwhile, of the bundle that is at its path now.

        Args:
            model: Its name, or its folder.
            load_by: When loading it is given up, as far as ONNX Runtime notices.

        Raises:
            PipelineError: It cannot be found, as `find_folder`, or loaded, as `load` raises it.
            PoolError: It takes or gives other than numbers.
        """
        folder = self.find_folder(model)  # each time: a link on the way may have been moved
        with self._lock:
            entry = self._entries.setdefault(folder, _Entry())
            entry.users += 1
        try:
            loaded = entry.loaded
            if loaded is None or loaded[0] != _read_stamp(folder):
                load_by.acquire(entry.lock)
                try:
                    loaded, stamp = entry.loaded, _read_stamp(folder)
                    if loaded is None or loaded[0] != stamp:
                        entry.loaded = None  # the old one must not answer for a bundle that was replaced
                        entry.loaded = loaded = stamp, self._load(folder, load_by.remaining_s())
                finally:
                    entry.lock.release()
                self.trim()
            yield loaded[1]
        finally:
            with self._lock:
                entry.users -= 1
                entry.used_s = time.monotonic()
                if entry.loaded is None and not entry.users:
                    self._entries.pop(folder, None)

    def _load(self, folder: str, timeout_s: float | None) -> OpenedModel:
        config = self._config
        opened = open_bundle(
            folder,
            timeout_s=timeout_s,
            digests=config.digests,
            precision=config.precision,
            require_signature=config.require_signature,
        )
        return OpenedModel(opened.config.name, opened)

    def trim(self) -> None:
        """Drops models that nobody uses, the one unused for longest first, while memory is short."""
        limit = self._config.max_memory_bytes
        while limit is not None and private_bytes() > limit:
            with self._lock:
                unused = {folder: entry for folder, entry in self._entries.items() if not entry.users}
                if not unused:
                    return
                del self._entries[min(unused, key=lambda folder: unused[folder].used_s)]
            unused.clear()
            gc.collect()
            with contextlib.suppress(AttributeError, OSError):  # glibc has it, and keeps freed memory without
                ctypes.CDLL(None).malloc_trim(0)

    def describe(self) -> list[dict[str, Any]]:
        """Returns the models that were named or are loaded, as JSON types."""
        names = {self.find_folder(name): name for name in self._config.models}
        with self._lock:
            loaded = {folder: entry.loaded for folder, entry in self._entries.items()}
        return [
            {"name": names.get(folder), "bundle": folder, "variant": model and model[1].variant}
            for folder, model in {**loaded, **{one: loaded.get(one) for one in names}}.items()
        ]


def _read_stamp(folder: str) -> tuple[int, ...]:
    return find_stamp(f"{folder}/{LOADER_FILE}")[:4]  # without the change time, which linking sets
