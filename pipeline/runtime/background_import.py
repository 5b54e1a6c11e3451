"""ONNX Runtime takes longer to import than a bundle takes to check, so a thread of its own does it."""

from __future__ import annotations

import sys
import threading
from typing import Any

from pipeline.errors import MissingExtraError, PipelineError
from pipeline.runtime.deadline import Deadline
from pipeline.telemetry import disable_telemetry


def import_onnxruntime() -> Any:
    """Imports ONNX Runtime, without its telemetry, and returns the module.

    Raises:
        MissingExtraError: It is not installed, or its library cannot be loaded.
    """
    disable_telemetry()
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(
            f"cannot import onnxruntime\n  {error}", hint='pip install "ortprep[gpu]"'
        ) from error
    return onnxruntime


class BackgroundImport:
    """ONNX Runtime, being imported by a thread until someone needs it."""

    def __init__(self) -> None:
        self._error: PipelineError | None = None
        self._thread: threading.Thread | None = None
        if "onnxruntime" not in sys.modules:
            # No daemon: an interpreter that ends in the middle of loading a library may crash.
            self._thread = threading.Thread(target=self._import, name="ortprep-import")
            self._thread.start()

    def _import(self) -> None:
        try:
            import_onnxruntime()
        except PipelineError as error:
            self._error = error

    def wait(self, deadline: Deadline) -> Any:
        """Returns the module.

        Raises:
            LoadTimeoutError: The deadline passed; the thread goes on until the import is done.
            MissingExtraError: ONNX Runtime cannot be imported.
        """
        while self._thread is not None and self._thread.is_alive():
            remaining_s = deadline.remaining_s()
            self._thread.join(None if remaining_s is None else min(remaining_s, threading.TIMEOUT_MAX))
        if self._error is not None:
            raise self._error
        return import_onnxruntime()
