"""What a load has decided and made: a session of a resolved variant, and what the log says of it."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from ortprep.runtime.loading.session import PLAIN_CLASS, build_session, described_as, with_device

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import onnxruntime

    from ortprep.bundle.loader_config import LoaderConfig, Variant
    from ortprep.bundle.session_record import SessionPlan
    from ortprep.runtime.loading.load_options import Cancellation, LoadOptions
    from ortprep.runtime.loading.resolved_variant import ResolvedVariant
    from ortprep.runtime.loading.variant_selection import PassedOver

_SPINNING = ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning")


_LOGGER = "ortprep.runtime.loading.bundle_loader"
"""The logger that the documentation names, of `load` and of the drop-in."""

_LOGGED: set[str] = set()
"""Reasons for a limit of threads that this process has logged."""


class OpenedBundle:
    """A session, and the decisions that led to it."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        plan: SessionPlan,
        resolved: ResolvedVariant,
        options: LoadOptions,
    ) -> None:
        self.session = session
        self.plan = plan
        self.resolved = resolved
        self.options = options

    def later_options(self) -> LoadOptions:
        """Returns the options of sessions that are made later beside this one."""
        from ortprep.runtime.loading.load_options import NO_DEADLINE

        return self.options.replace(deadline=NO_DEADLINE, replacement=None)

    @property
    def root(self) -> Path:
        """The bundle's folder, free of links."""
        from pathlib import Path

        return Path(self.resolved.root)

    @property
    def config(self) -> LoaderConfig:
        """The bundle's loader config, read when it is first used.

        Raises `LoadError` if the bundle was replaced since it was opened.
        """
        from ortprep.runtime.loading.variant_resolver import read_config

        return read_config(self.resolved)

    @property
    def variant(self) -> Variant:
        """The variant that was taken; raises as `config` does."""
        from ortprep.runtime.loading.variant_resolver import read_variant

        return read_variant(self.resolved)

    @property
    def passed_over(self) -> tuple[PassedOver, ...]:
        """Those the bundle prefers to it, and why they were not taken."""
        from ortprep.runtime.loading.variant_selection import PassedOver

        return tuple(PassedOver(name, reasons) for name, reasons in self.resolved.passed_over)


def make_session(
    resolved: ResolvedVariant, options: LoadOptions, *, cancellation: Cancellation | None = None
) -> tuple[SessionPlan, onnxruntime.InferenceSession]:
    """Makes a session of a resolved variant, of files that are still those that were checked.

    With full digests each session's files are hashed for it, also those of later phases. Returns how it was
    made, and the session; raises as `load` does.
    """
    first = None if options.phases == "steady" else resolved.first
    plan = resolved.steady if first is None else first
    if options.digests != "full":
        return _make_session(plan, resolved, options, cancellation, resolved.root)
    from pathlib import Path

    from ortprep.bundle.paths import resolve_inside
    from ortprep.runtime.loading.variant_resolver import read_config, read_variant
    from ortprep.runtime.loading.verified_files import verified_files

    root, variant = Path(resolved.root), read_variant(resolved)
    with verified_files(root, read_config(resolved), variant, options) as folder:
        made = plan._replace(model=resolve_inside(folder, variant.model))
        made, session = _make_session(made, resolved, options, cancellation, str(folder))
    return made._replace(model=plan.model), session


def _make_session(
    plan: SessionPlan,
    resolved: ResolvedVariant,
    options: LoadOptions,
    cancellation: Cancellation | None,
    root: str,
) -> tuple[SessionPlan, onnxruntime.InferenceSession]:
    """Makes a plan's session for this process, and checks that no file changed meanwhile."""
    if options.device_id is not None:
        plan = with_device(plan, options.device_id)
    if options.adapt is not None:
        plan = options.adapt(plan)
    own = options.session_options or {}
    if not own.get("intra_op_num_threads"):
        plan = limit_threads(plan, options.threads, may_spin=options.may_spin)
    if own:
        from ortprep.runtime.loading.caller_options import merge_options

        plan = merge_options(plan, own)
    timeout_s = options.deadline.remaining_s()
    session = build_session(plan, timeout_s=timeout_s, cancellation=cancellation, create=options.replacement)
    if options.check == "golden":
        from ortprep.runtime.loading.variant_resolver import check_resolved

        check_resolved(resolved, session, root)
    # Copies cannot change.
    changed = resolved.find_changed() if root == resolved.root else ()
    if changed:
        from ortprep.errors import IntegrityError

        raise IntegrityError(
            f"files changed while they were loaded: {resolved.root}\n"
            f"  expected the files that were checked, got different {', '.join(changed)}"
        )
    options.deadline.remaining_s()
    return plan, session


def find_threads(workers: int | None = None) -> int | None:
    """Returns the most threads that a session of this process should have; None for as many as its plan says.

    The reason is logged once at INFO.

    Args:
        workers: Number of processes that share the cores; None for that of the environment.
    """
    import os

    from ortprep.runtime.machine.processor import find_thread_limit

    limit = find_thread_limit(os.environ, workers=workers)
    if limit is None:
        return None
    threads, reason = limit
    if reason not in _LOGGED:
        _LOGGED.add(reason)
        log_line("info", "at most %d threads per session: %s", threads, reason)
    return threads


def limit_threads(plan: SessionPlan, threads: int | None, *, may_spin: bool) -> SessionPlan:
    """Returns a plan that takes no more threads, within and between operators, than a worker's share.

    A plan with fewer keeps its number. Idle threads spin if the plan lets them and `may_spin`.
    """
    attributes = dict(plan.session_options.attributes)
    if threads is not None:
        for name in ("intra_op_num_threads", "inter_op_num_threads"):
            recorded = attributes.get(name, 0)
            is_parallel = name.startswith("intra") or name in attributes
            if is_parallel and (not isinstance(recorded, int) or recorded <= 0 or recorded > threads):
                attributes[name] = threads
    entries = dict(plan.session_options.config_entries)
    if not may_spin:
        entries.update(dict.fromkeys(_SPINNING, "0"))
    options = plan.session_options._replace(attributes=attributes, config_entries=entries)
    return plan._replace(session_options=options)


def describe_selection(resolved: ResolvedVariant, message: str, *values: object) -> tuple[Any, ...]:
    """Returns what `log_line` takes: a line that ends in the variant and why others were passed over."""
    if not resolved.passed_over:
        return "info", f"{message} variant %s", *values, resolved.name
    reasons = " | ".join(f"{passed}: {'; '.join(lacks)}" for passed, lacks in resolved.passed_over)
    return "warning", f"{message} variant %s; passed over: %s", *values, resolved.name, reasons


def log_line(level: str, message: str, *values: object) -> None:
    """Logs a line; one below a warning only if the application has imported `logging`, which takes long."""
    if level == "warning" or "logging" in sys.modules:
        from ortprep.quoting import printable

        # Where an application has no handlers, `logging` itself writes to the terminal.
        shown = [value if isinstance(value, int | float) else printable(str(value)) for value in values]
        getattr(_logger(), level)(message, *shown)


@functools.cache
def _logger() -> logging.Logger:
    """Returns the logger, which is asked for once: a handler that raises could keep `logging` locked then."""
    import logging

    return logging.getLogger(_LOGGER)


def serve_with(
    session: Any, attribute: str, state: object, replace_methods: Callable[[Any], Mapping[str, Any]]
) -> None:
    """Sets an attribute of a session, and has methods of its class use it.

    The class is this package's own: the drop-in's, or a subclass that a session of `load` becomes one of.
    Classes of the application that inherit from it stay as they are, and their instances too.

    Args:
        session: The session.
        attribute: Name of the attribute; it is None for sessions that this was not called for.
        state: Its value.
        replace_methods: Returns the methods, by name, that take the place of a class's own.
    """
    own = next((kind for kind in type(session).__mro__ if PLAIN_CLASS in vars(kind)), None)
    if own is None:
        plain: Any = type(session)
        session.__class__ = own = _serving_class(plain)
    _replace_once(own, attribute, replace_methods)
    setattr(session, attribute, state)


@functools.cache
def _replace_once(own: Any, attribute: str, replace_methods: Callable[[Any], Mapping[str, Any]]) -> None:
    """Replaces methods of a class; two threads may do so at once, and then each call passes both."""
    setattr(own, attribute, None)  # first: other threads run sessions of this class
    for name, method in replace_methods(own).items():
        setattr(own, name, method)


@functools.cache
def _serving_class(plain: Any) -> Any:
    return described_as(plain, type(plain)(plain.__name__, (plain,), {PLAIN_CLASS: plain}))
