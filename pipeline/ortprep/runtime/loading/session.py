"""From a recorded plan to an `onnxruntime.InferenceSession`: the one place that makes sessions.

Errors are imported where they are raised: a load that goes well needs none of them, and they take half a
millisecond.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.runtime.loading.load_options import Deadline
from ortprep.telemetry import disable_telemetry

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.loading.load_options import Cancellation, SessionFactory

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

PLAIN_CLASS = "_ortprep_plain_class"
"""Attribute of a class that this package puts in the place of a session's class: the class itself."""

MODEL_CONFIG_VARIABLE = "ORT_LOAD_CONFIG_FROM_MODEL"
"""Has ONNX Runtime take session options from a model."""

_ENUMERATIONS = {"execution_mode": "ExecutionMode", "execution_order": "ExecutionOrder"}

KNOWN_ATTRIBUTES = {
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "enable_profiling",
    "execution_mode",
    "execution_order",
    "inter_op_num_threads",
    "intra_op_num_threads",
    "log_severity_level",
    "log_verbosity_level",
    "logid",
    "optimized_model_filepath",
    "profile_file_prefix",
    "use_deterministic_compute",
    "use_per_session_threads",
}
"""Attributes of `onnxruntime.SessionOptions` a plan may set; an enumeration's value is given by its name."""


def import_onnxruntime() -> Any:
    """Imports ONNX Runtime, without its telemetry unless that is too late, and returns the module.

    Raises:
        MissingExtraError: It is not installed, or its library cannot be loaded.
    """
    disable_telemetry()
    try:
        return _import()
    except ImportError as error:
        from ortprep.errors import MissingExtraError
        from ortprep.versions import hint_to_install

        raise MissingExtraError(f"cannot import onnxruntime\n  {error}", hint=hint_to_install()) from error


def _import() -> Any:
    import onnxruntime

    return onnxruntime


_FRAME_SLOTS = 16_000
"""Size of `_import`'s frame, in words.

CPython keeps frames in chunks of 16 KiB. Calls that cross the end of a chunk again and again map and free the
next one each time. A few frames below a script's top, `import onnxruntime` does so 109 to 1,740 times, which
takes 8 to 10 ms (counted with strace, CPython 3.11). A frame this large gets a chunk of 256 KiB, with room
for the frames of the import. Its own pages are never touched. A thread would have a chunk of its own as well,
but also an allocation arena of its own, which grows by 1,900 calls of mprotect.
"""

_import.__code__ = _import.__code__.replace(co_stacksize=_FRAME_SLOTS)


_CHUNK_BYTES = 32 * 1024 * 1024 - 64 * 1024
"""A little less than glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64-bit machines; larger chunks change nothing."""


@functools.cache
def keep_freed_memory() -> None:
    """Has glibc reuse freed memory for arrays of up to 32 MiB, as it does after most plain loads.

    At first glibc maps each allocation above 128 KiB afresh and unmaps it when it is freed, so new
    arrays cost a page fault for every 4 KiB of them, in every run again. When a larger mapped chunk is freed,
    glibc raises that limit to the chunk's size, and keeps up to twice as much free memory (mallopt(3),
    M_MMAP_THRESHOLD). A plain load frees such chunks by chance: copies of weights. A prepared load does not,
    since it maps its weights. This frees one, whose pages are never touched, in 0.03 ms.

    It changes nothing with another allocator, or where the user set `MALLOC_MMAP_THRESHOLD_` or the like.
    """
    bytes(_CHUNK_BYTES)


def default_plan(
    model: str,
    provider: str = CPU,
    *,
    level: str = "ORT_ENABLE_ALL",
    attributes: Mapping[str, int | bool | str] | None = None,
    provider_options: Mapping[str, str] | None = None,
) -> SessionPlan:
    """Returns the plan of plain ONNX Runtime: what `InferenceSession(model, providers=[…])` does.

    Args:
        model: Path of the ONNX file.
        provider: The preferred execution provider; CPU follows any other, as it does in ONNX Runtime.
        level: Name of the graph optimisation level.
        attributes: Attributes of the session options.
        provider_options: Options of the preferred provider.
    """
    preferred = ProviderRecord(provider, dict(provider_options or {}))
    providers = (preferred,) if provider == CPU else (preferred, ProviderRecord(CPU))
    options = SessionOptionsRecord(level, dict(attributes or {}))
    return SessionPlan(model, options, providers)


def with_device(plan: SessionPlan, device_id: int) -> SessionPlan:
    """Returns the plan for another CUDA device; a plan without CUDA is returned as it is."""
    providers = tuple(
        provider._replace(options={**provider.options, "device_id": str(device_id)})
        if provider.name == CUDA
        else provider
        for provider in plan.providers
    )
    return plan._replace(providers=providers)


@functools.cache
def onnxruntime_errors() -> tuple[type[Exception], ...]:
    """Returns every exception class that ONNX Runtime raises; most of them share no base but `Exception`."""
    import_onnxruntime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kinds = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (RuntimeError, ValueError, *kinds)


def build_session(
    plan: SessionPlan,
    *,
    timeout_s: float | None = None,
    cancellation: Cancellation | None = None,
    create: SessionFactory | None = None,
) -> onnxruntime.InferenceSession:
    """Makes the session a plan describes, or raises why not; never a session on other providers.

    Of the threads of a process one at a time makes a session on a device; the others wait for it.

    Args:
        plan: The model, its options and its providers.
        timeout_s: Seconds after which the load, waiting included, is cancelled. ONNX Runtime before 1.31
            keeps the interpreter to itself while it works, so there the deadline is noticed late, though
            never missed.
        cancellation: Ends the load when it is requested, with an error or, close to its end, with a session;
            one that waits, when its turn comes. A load that has one is in the background: every load without
            requests it, and does not wait long for the lock of its device.
        create: What makes the session, in place of ONNX Runtime's `InferenceSession`, with its arguments.

    Raises:
        LoadTimeoutError: The deadline passed.
        LoadError: A requested provider was not obtained, ONNX Runtime refused the model or an option, or the
            load was cancelled.
        MissingExtraError: ONNX Runtime is not installed.
    """
    onnxruntime, deadline = import_onnxruntime(), Deadline(timeout_s, subject=plan.model)
    _check_offered(plan, onnxruntime.get_available_providers())
    if any(provider.name == CUDA for provider in plan.providers):
        _preload_cuda()
    options = onnxruntime.SessionOptions()
    _set_options(options, plan)
    if cancellation is None:
        for background in tuple(_IN_BACKGROUND):
            background.request()
    else:
        _IN_BACKGROUND.add(cancellation)
        cancellation.cover(options)
    try:
        session = create_alone(
            plan,
            deadline,
            lambda: _create_session(plan, options, deadline, create or plain_session_class()),
        )
    finally:
        if cancellation is not None:
            cancellation.release()
            _IN_BACKGROUND.discard(cancellation)
    deadline.remaining_s()
    _check_obtained(plan, session.get_providers())
    keep_freed_memory()
    return session


def plain_session_class() -> Any:
    """Returns ONNX Runtime's own `InferenceSession`, whatever an application has put in its place."""
    import_onnxruntime()
    from onnxruntime.capi import onnxruntime_inference_collection as collection

    # Neither module's name for it tells: an application's wrapper, which may call `load`, has either.
    own = (kind for kind in collection.Session.__subclasses__() if kind.__module__ == collection.__name__)
    return next(own, collection.InferenceSession)


def described_as(base: type[Any], replacement: type[Any]) -> type[Any]:
    """Returns a class that stands in the place of another, with that one's name and documentation."""
    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(replacement, name, getattr(base, name))
    return replacement


def _create_session(
    plan: SessionPlan, options: Any, deadline: Deadline, create: SessionFactory
) -> onnxruntime.InferenceSession:
    """Creates a session within a deadline; raises as `build_session`."""
    remaining_s = deadline.remaining_s()
    try:
        with contextlib.nullcontext() if remaining_s is None else _cancelled_after(options, remaining_s):
            return create(
                plan.model,
                options,
                providers=[(provider.name, dict(provider.options)) for provider in plan.providers],
                # Without this, a provider that throws is replaced by CPU and a line on stdout.
                enable_fallback=0,
            )
    except _refusals() as error:
        deadline.remaining_s()
        from ortprep.errors import LoadError

        raise LoadError(
            f"ONNX Runtime cannot load {plan.model}\n  {type(error).__name__}: {error}"
        ) from error


def _refusals() -> tuple[type[Exception], ...]:
    # TypeError is what becomes of a path that is not UTF-8, and of a value of another type.
    return (TypeError, *onnxruntime_errors())


_IN_BACKGROUND: set[Cancellation] = set()
"""Loads that nobody waits for."""

_CREATING: dict[str, _thread.RLock] = {}
"""A lock for every device a session was made on; what makes a session may make another, as wrappers do."""

# Who had one at a fork stayed in the parent.
os.register_at_fork(after_in_child=_CREATING.clear)


def create_alone(plan: SessionPlan, deadline: Deadline, create: Callable[[], Any]) -> Any:
    """Makes a session while no other thread makes one on the plan's device, and returns it.

    ONNX Runtime promises only that runs are safe beside each other; races between creations are reported
    (https://github.com/microsoft/onnxruntime/issues/27089).
    """
    lock: Any = _CREATING.setdefault(_device_of(plan), _thread.RLock())
    if lock._is_owned():
        return create()
    # The handler of a signal may raise after any call, and the lock must not stay acquired then: it is
    # acquired within `try`, and the first call of `finally` releases it. A context manager lacks both.
    try:
        deadline.acquire(lock)
        return create()
    finally:
        try:  # noqa: SIM105
            lock.release()
        except RuntimeError:  # it was not acquired
            pass


def _device_of(plan: SessionPlan) -> str:
    preferred = plan.providers[0] if plan.providers else ProviderRecord(CPU)
    return f"{preferred.name}:{preferred.options.get('device_id', '0')}"


def _set_options(options: Any, plan: SessionPlan) -> None:
    """Sets a plan's options on a `SessionOptions`; raises `LoadError` for an unknown or bad one."""
    record = plan.session_options
    options.graph_optimization_level = _enumerated("GraphOptimizationLevel", record.graph_optimization_level)
    for name, value in record.attributes.items():
        if name not in KNOWN_ATTRIBUTES or not hasattr(options, name):
            from ortprep.errors import LoadError

            raise LoadError(
                f"unknown session option for {plan.model}\n"
                f"  expected one of ONNX Runtime {import_onnxruntime().__version__}, got {name!r}"
            )
        kind = _ENUMERATIONS.get(name)
        try:
            setattr(options, name, value if kind is None else _enumerated(kind, str(value)))
        except _refusals() as error:
            from ortprep.errors import LoadError

            raise LoadError(f"bad session option for {plan.model}: {name}={value!r}\n  {error}") from error
    for key, entry in record.config_entries.items():
        try:
            options.add_session_config_entry(key, entry)
        except _refusals() as error:
            from ortprep.errors import LoadError

            raise LoadError(
                f"bad session config entry for {plan.model}: {key[:80]!r}={entry[:80]!r}\n  {error}"
            ) from error


def _enumerated(kind: str, name: str) -> Any:
    """Returns a member of one of ONNX Runtime's enumerations by its name."""
    onnxruntime = import_onnxruntime()
    member = getattr(onnxruntime, kind).__members__.get(name)
    if member is None:
        expected = ", ".join(getattr(onnxruntime, kind).__members__)
        from ortprep.errors import LoadError

        raise LoadError(
            f"ONNX Runtime {onnxruntime.__version__} has no {kind} named {name!r}\n"
            f"  expected one of {expected}"
        )
    return member


@contextlib.contextmanager
def _cancelled_after(options: Any, timeout_s: float) -> Iterator[None]:
    """Has ONNX Runtime give up a load if the block takes longer than a timeout."""
    import threading

    timer = threading.Timer(
        min(timeout_s, threading.TIMEOUT_MAX), options.set_load_cancellation_flag, (True,)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _check_offered(plan: SessionPlan, available: list[str]) -> None:
    """Raises `LoadError` unless this ONNX Runtime has the providers of a plan."""
    missing = [provider.name for provider in plan.providers if provider.name not in available]
    if missing:
        from ortprep.errors import LoadError

        raise LoadError(
            f"this ONNX Runtime has no {', '.join(missing)}: {plan.model}\n"
            f"  expected one of {', '.join(available)}",
            hint=_provider_hint(missing),
        )


def _check_obtained(plan: SessionPlan, obtained: list[str]) -> None:
    """ONNX Runtime gives a CPU session, and a log line, where a provider's libraries cannot be loaded."""
    requested = [provider.name for provider in plan.providers]
    if obtained[: len(requested)] != requested:
        from ortprep.errors import LoadError

        raise LoadError(
            f"session did not get the execution providers asked for: {plan.model}\n"
            f"  expected {', '.join(requested)}, got {', '.join(obtained)}",
            hint=_provider_hint([name for name in requested if name not in obtained]),
        )


def _provider_hint(missing: list[str]) -> str | None:
    if CUDA not in missing:
        return None
    from ortprep.versions import hint_to_install

    return f"{hint_to_install('cuda')}  (and check that nvidia-smi lists a GPU)"


@functools.cache
def _preload_cuda() -> None:
    """Loads the CUDA and cuDNN libraries of NVIDIA's wheels, where they are installed, once per process."""
    import io
    import logging

    onnxruntime = import_onnxruntime()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        onnxruntime.preload_dlls()
    for line in output.getvalue().splitlines():
        logging.getLogger(__name__).warning("preload_dlls: %s", line)
