"""Puts the class whose sessions may be of a bundle in the place of `onnxruntime.InferenceSession`."""

from __future__ import annotations

import os
from typing import Any

from ortprep.quoting import terminal_handler
from ortprep.runtime.dropin.import_hook import call_after_import
from ortprep.runtime.dropin.launch import FORK_VARIABLE, VERBOSE_VARIABLE
from ortprep.runtime.loading.opened_bundle import log_line
from ortprep.runtime.loading.session import PLAIN_CLASS
from ortprep.telemetry import disable_telemetry


def install(*, fork: bool = False) -> None:
    """Makes this process create its sessions from bundles of the same models, where there are any.

    Every `onnxruntime.InferenceSession(…)` then does what `ortprep.session(…)` does. ONNX Runtime need not be
    imported yet, and this call does not import it. A module that imported the class by name before
    (`from onnxruntime import InferenceSession`) keeps the plain one. Later calls do
    nothing, but that `fork` holds for the sessions that are created afterwards.

    ONNX Runtime's telemetry is turned off, unless `ORT_DISABLE_TELEMETRY` is set or ONNX Runtime is imported
    already; then one `RuntimeWarning` says so.

    Args:
        fork: Whether sessions of bundles have one thread, so that processes that are forked afterwards can
            run them (`load_before_fork`). `ORTPREP_FORK=1` does the same; this call sets it.
    """
    disable_telemetry()
    if fork:
        os.environ[FORK_VARIABLE] = "1"
    call_after_import("onnxruntime", install_in)


def install_in(onnxruntime: Any) -> None:
    """Does what `install` does, in ONNX Runtime's module."""
    session_class = getattr(onnxruntime, "InferenceSession", None)
    if hasattr(session_class, PLAIN_CLASS):
        return
    if os.environ.get(VERBOSE_VARIABLE):
        _log_to_stderr()
    if session_class is None or not hasattr(onnxruntime, "SessionOptions"):
        log_line("info", "no session of %s comes from a bundle: it is not ONNX Runtime", onnxruntime.__name__)
        return
    from ortprep.runtime.dropin.session import bundle_session_class

    put_in_place(onnxruntime, bundle_session_class())


def put_in_place(onnxruntime: Any, session_class: type) -> None:
    """Has ONNX Runtime's modules offer another class as `InferenceSession`."""
    from onnxruntime.capi import onnxruntime_inference_collection

    for module in (onnxruntime, onnxruntime_inference_collection):
        module.InferenceSession = session_class


def _log_to_stderr() -> None:
    import logging

    log = logging.getLogger("ortprep")
    log.addHandler(terminal_handler("ortprep: %(message)s", lines=False))
    log.setLevel(logging.INFO)
    log.propagate = False
