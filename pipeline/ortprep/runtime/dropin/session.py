"""`session`: an `onnxruntime.InferenceSession`, of a bundle if there is one of the same model; and `install`.

`ORTPREP_BUNDLES` says where bundles are, `ORTPREP_REQUIRE_SIGNATURE` which key they have to be signed with,
and `ORTPREP_FORK` that forks inherit the sessions.
An application gets all that it requests: what a bundle cannot give makes a plain session.
"""

from __future__ import annotations

import abc
import functools
import os
from typing import TYPE_CHECKING, Any

from ortprep.quoting import terminal_handler
from ortprep.runtime.dropin.import_hook import call_after_import
from ortprep.runtime.dropin.launch import (
    BUNDLES_VARIABLE,
    FORK_VARIABLE,
    PULL_HINT,
    SIGNATURE_VARIABLE,
    VERBOSE_VARIABLE,
)
from ortprep.runtime.dropin.session_request import (
    SessionRequest,
    choose_placement,
    find_obstacle,
    has_gpu,
)
from ortprep.runtime.dropin.source_index import (
    IndexedBundle,
    describe_error,
    is_source,
    list_bundles,
)
from ortprep.runtime.loading.bundle_loader import open_folder
from ortprep.runtime.loading.caller_options import read_options, watch_options
from ortprep.runtime.loading.load_options import LoadOptions
from ortprep.runtime.loading.opened_bundle import describe_selection, find_threads, log_line
from ortprep.runtime.loading.session import (
    PLAIN_CLASS,
    described_as,
    import_onnxruntime,
)
from ortprep.telemetry import disable_telemetry

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnxruntime

    from ortprep.bundle.session_record import SessionPlan
    from ortprep.errors import PipelineError

disable_telemetry()  # an application imports ONNX Runtime before its first session
call_after_import("onnxruntime", watch_options)


def session(
    path_or_bytes: str | bytes | os.PathLike[str],
    sess_options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
    provider_options: Sequence[dict[Any, Any]] | None = None,
    **kwargs: Any,
) -> onnxruntime.InferenceSession:
    """Creates the session that `onnxruntime.InferenceSession` creates, sooner if there is a bundle for it.

    A bundle is used if it was prepared from the same bytes, has a variant for this machine on the requested
    providers, and supports everything else that the call asks for. Otherwise the session is a plain one, and
    the reason is logged at INFO; at WARNING, if such a bundle is damaged or ONNX Runtime refuses it.

    Args:
        path_or_bytes: The source model.
        sess_options: As ONNX Runtime takes them; they take precedence over the bundle's.
        providers: Execution providers, as names or with options; None for ONNX Runtime's default.
        provider_options: Options of each provider; they take precedence over the bundle's.
        **kwargs: Every other argument of `onnxruntime.InferenceSession`.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        Exception: Whatever `onnxruntime.InferenceSession` raises.
    """
    opened: onnxruntime.InferenceSession = bundle_session_class()(
        path_or_bytes, sess_options, providers, provider_options, **kwargs
    )
    return opened


@functools.cache
def bundle_session_class() -> Any:
    """Returns the subclass of the application's `InferenceSession` whose sessions may be of a bundle.

    That is ONNX Runtime's own class unless the application has put another in its place. The subclass has its
    name. Sessions that the other class made are instances of it, too, so `isinstance` answers as before where
    it has taken the other's place.
    """
    plain = _replaced_class()

    def initialise(
        self: Any,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        request = SessionRequest(path_or_bytes, sess_options, providers, provider_options, kwargs)
        reason = _open_bundle(self, request)
        if reason is not None:
            level = "warning" if os.environ.get(FORK_VARIABLE) else "info"  # a fork cannot run it
            log_line(level, "plain session of %s: %s", _name(request), reason)
            plain.__init__(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)

    def is_subclass(cls: type, other: type) -> Any:
        return True if cls is replacing and issubclass(other, plain) else NotImplemented

    namespace = {
        "__init__": functools.wraps(plain.__init__)(initialise),
        "__subclasshook__": classmethod(is_subclass),
        PLAIN_CLASS: plain,
    }
    replacing = described_as(plain, abc.ABCMeta(plain.__name__, (plain,), namespace))
    return replacing


def _replaced_class() -> Any:
    session_class = import_onnxruntime().InferenceSession
    return getattr(session_class, PLAIN_CLASS, session_class)


def _open_bundle(instance: Any, request: SessionRequest) -> str | None:
    """Makes an instance the session of a bundle; returns None, or why there is none for it."""
    places = os.environ.get(BUNDLES_VARIABLE)
    if not places:
        return f"{BUNDLES_VARIABLE} is not set"
    if "://" in places:  # and perhaps credentials, which no log may have
        log_line("warning", "no bundles in a registry (hint: %s)", PULL_HINT)
        return f"{BUNDLES_VARIABLE} names a registry"
    if not isinstance(request.model, str | bytes | os.PathLike):
        return "it is neither a path nor bytes"
    try:
        bundles = _find_bundles(request.model, places)
    except OSError as error:
        return str(error.strerror)
    except ValueError as error:  # no path at all; ONNX Runtime says so in its own way
        return str(error)
    if not bundles:
        return (
            f"no bundle was prepared from these bytes in {', '.join(filter(None, places.split(os.pathsep)))}"
        )
    onnxruntime = import_onnxruntime()
    return find_obstacle(request, onnxruntime) or _try_bundles(instance, request, onnxruntime, bundles)


def _find_bundles(model: Any, places: str) -> list[IndexedBundle]:
    """Returns the bundles that were prepared from a model; raises `OSError` if it cannot be read."""
    if isinstance(model, bytes):
        same_size = [bundle for bundle in list_bundles(places) if bundle.source[0].size_bytes == len(model)]
        if not same_size:
            return []
        from ortprep.bundle.digest import digest_bytes

        digest = digest_bytes(model)
        # External data of a model in memory is wherever the options say.
        return [
            bundle for bundle in same_size if len(bundle.source) == 1 and bundle.source[0].sha256 == digest
        ]
    path = os.fspath(model)
    size_bytes = os.stat(path).st_size
    same_size = [bundle for bundle in list_bundles(places) if bundle.source[0].size_bytes == size_bytes]
    return [bundle for bundle in same_size if is_source(bundle, path)]


def _try_bundles(
    instance: Any, request: SessionRequest, onnxruntime: Any, bundles: Sequence[IndexedBundle]
) -> str | None:
    """Opens an instance on the first bundle that fits; returns why none does, or None."""
    try:
        placement = choose_placement(request, onnxruntime, has_gpu=has_gpu)
    except ValueError as error:
        return str(error)
    if placement is None:
        return f"no bundle supports the providers {request.providers}"
    plain = _replaced_class()

    def create(*args: Any, **kwargs: Any) -> Any:
        plain.__init__(instance, *args, **kwargs)
        return instance

    options = LoadOptions(
        target=placement.target,
        device_id=placement.device_id,
        adapt=placement.apply,
        session_options=None if request.options is None else read_options(request.options),
        replacement=create,
        phases="auto",
        threads=find_threads(),
        require_signature=os.environ.get(SIGNATURE_VARIABLE) or None,
    )
    if is_for_forks := _is_for_forks(request, placement.target):
        options = _prepare_for_forks(options)
    reason = None
    for bundle in bundles:
        try:
            opened = open_folder(bundle.folder, options.replace(source=bundle.source))
        except Exception as error:  # narrowed below: a session that is made needs no module of errors
            from ortprep.errors import PipelineError

            if not isinstance(error, PipelineError):
                raise
            reason = _explain(error, bundle)
        else:
            _restore_request(instance, request)
            if is_for_forks:
                from ortprep.runtime.loading.forking import serve_forks

                serve_forks(opened)
            place = _name(request), bundle.folder
            log_line(*describe_selection(opened.resolved, "session of %s: %s,", *place))
            return None
    return reason


def _is_for_forks(request: SessionRequest, target: str) -> bool:
    """Returns whether forks are to inherit a session, and can; a warning says why they cannot."""
    if not os.environ.get(FORK_VARIABLE):
        return False
    from ortprep.runtime.loading.forking import find_fork_obstacle

    asked = find_fork_obstacle(request.options) if target == "cpu" else "a GPU"
    if asked is not None:
        log_line("warning", "no fork can run the session of %s: it asks for %s", _name(request), asked)
    return asked is None


def _prepare_for_forks(options: LoadOptions) -> LoadOptions:
    """Returns options that load a session which children of this process can use."""
    from ortprep.runtime.loading.forking import with_one_thread

    place = options.adapt

    def adapt(plan: SessionPlan) -> SessionPlan:
        return with_one_thread(plan if place is None else place(plan))

    return options.replace(adapt=adapt, phases="steady", may_spin=False, threads=None)


def _explain(error: PipelineError, bundle: IndexedBundle) -> str:
    """Returns in one line why a bundle was not used; logs it unless the bundle is for other machines."""
    from ortprep.errors import NoVariantError

    if not isinstance(error, NoVariantError):
        log_line("warning", "cannot use %s: %s", bundle.folder, describe_error(error))
    return " ".join(error.message.split())


def _restore_request(instance: Any, request: SessionRequest) -> None:
    """Sets the model and the options that the application passed.

    ONNX Runtime makes it again of them, plainly, when providers are changed or one fails.
    """
    in_memory = isinstance(request.model, bytes)
    instance._model_path = None if in_memory else os.fspath(request.model)
    instance._model_bytes = request.model if in_memory else None
    instance._sess_options_initial = request.options
    instance._enable_fallback = int(request.others.get("enable_fallback", 1)) == 1


def _name(request: SessionRequest) -> str:
    model = request.model
    if isinstance(model, str | os.PathLike):
        return str(model)
    return f"{len(model)} bytes" if isinstance(model, bytes) else f"a {type(model).__name__}"


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
