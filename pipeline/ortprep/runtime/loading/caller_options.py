"""The application's own session options beside a bundle's: the application's win.

Only the optimisation level is always the bundle's, whose graph was prepared for it; ONNX Runtime does not
tell a level that was chosen from its default.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ortprep.bundle.session_record import SessionPlan
from ortprep.runtime.loading.load_options import Deadline
from ortprep.runtime.loading.session import KNOWN_ATTRIBUTES, build_session, import_onnxruntime

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.errors import LoadError
    from ortprep.runtime.loading.load_options import Cancellation, SessionFactory, SessionOptions

_LEVEL, _DEFAULT_LEVEL = "graph_optimization_level", "ORT_ENABLE_ALL"
_AFFINITIES = "session.intra_op_thread_affinities"
_NEUTRAL = {
    "session.disable_prepacking": "0",
    "session.intra_op.allow_spinning": "1",
    "session.prepack.enable_parallel": "0",
}
"""Values that mean the same as none, of the entries that bundles often have; the table has the others'."""

_LOCKS: weakref.WeakKeyDictionary[Any, _thread.RLock] = weakref.WeakKeyDictionary()
"""A lock for every application's object, which one load at a time may change."""

_ADDED: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
"""Entries that loads added to an application's object: none can be removed, and they are not its own."""


def build_with_options(
    plan: SessionPlan,
    chosen: SessionOptions,
    *,
    deadline: Deadline,
    cancellation: Cancellation | None,
    create: SessionFactory | None = None,
) -> tuple[SessionPlan, onnxruntime.InferenceSession]:
    """Makes the session of a plan with the application's options, and returns both.

    An object is given back with its own values; waiting for another load with the same object counts against
    the deadline.

    Raises:
        LoadError: ONNX Runtime has no such option, or refused it; else as `build_session`.
    """
    if isinstance(chosen, Mapping):
        merged = merge_options(plan, chosen)
        timeout_s = deadline.remaining_s()
        return merged, build_session(merged, timeout_s=timeout_s, cancellation=cancellation, create=create)
    _require_object(chosen)
    lock = _LOCKS.setdefault(chosen, _thread.RLock())
    deadline.acquire(lock)
    try:
        _require_returnable(plan, chosen)
        merged = merge_options(plan, chosen)
        give_back = _giving_back(chosen, merged)
        chosen.set_load_cancellation_flag(False)
        try:
            timeout_s = deadline.remaining_s()
            return merged, build_session(
                merged, timeout_s=timeout_s, cancellation=cancellation, base_options=chosen, create=create
            )
        finally:
            give_back(chosen)
    finally:
        lock.release()


def _require_returnable(plan: SessionPlan, chosen: Any) -> None:
    if _AFFINITIES in plan.session_options.config_entries and not own_entries(chosen, [_AFFINITIES]):
        raise _refusal(
            f"session options cannot be given back: {plan.model} sets {_AFFINITIES}\n"
            "  expected a mapping of the application's options, since an object keeps this entry for good",
            hint="load(…, session_options={'enable_cpu_mem_arena': False})",
        )


def merge_options(plan: SessionPlan, chosen: SessionOptions) -> SessionPlan:
    """Returns a plan with the application's options; what they contradict is logged, once for each.

    Config entries of an object that the plan does not have stay in the object, and are not in the plan.
    """
    record = plan.session_options
    if isinstance(chosen, Mapping):
        attributes, entries = split_options(chosen)
    else:
        attributes, entries = (
            _read_attributes(chosen),
            own_entries(chosen, record.config_entries),
        )
    shared = [
        (name, value, theirs[name])
        for ours, theirs in ((record.attributes, attributes), (record.config_entries, entries))
        for name, value in ours.items()
        if name in theirs
    ]
    if shared:
        _log_contradictions(plan, shared)
    level = _level_of(chosen)
    if level not in (None, _DEFAULT_LEVEL, record.graph_optimization_level):
        _log_once(f"{plan.model}: {_LEVEL} stays {record.graph_optimization_level}, not {level}")
    options = record._replace(
        attributes={**record.attributes, **attributes}, config_entries={**record.config_entries, **entries}
    )
    return plan._replace(session_options=options)


def _log_contradictions(plan: SessionPlan, shared: Iterable[tuple[str, Any, Any]]) -> None:
    """Logs the options of an application that differ from its bundle's."""
    from ortprep.options import format_option

    contradictions = [
        f"{name}={theirs!r} instead of {ours!r}"
        for name, ours, theirs in shared
        if format_option(theirs) != format_option(ours)
    ]
    if contradictions:
        _log_once(f"{plan.model}: the application's session options win: {', '.join(contradictions)}")


def _level_of(chosen: SessionOptions) -> str | None:
    level = chosen.get(_LEVEL) if isinstance(chosen, Mapping) else getattr(chosen, _LEVEL)
    return None if level is None else str(_name_of(level))


def split_options(chosen: SessionOptions) -> tuple[dict[str, str | int | bool], dict[str, str]]:
    """Returns the attributes and the config entries that an application chose.

    Of an `onnxruntime.SessionOptions` that is every attribute that is not at its default, and every entry
    that the table of options knows; its other entries stay in the object.

    Raises:
        LoadError: ONNX Runtime has no such session option.
    """
    if not isinstance(chosen, Mapping):
        from ortprep.options import NEWEST, known_session_config

        names = (option.name for option in known_session_config(NEWEST))
        return _read_attributes(chosen), own_entries(chosen, names)
    known = (*KNOWN_ATTRIBUTES, _LEVEL)
    unknown = [
        name for name in chosen if not isinstance(name, str) or ("." not in name and name not in known)
    ]
    if unknown:
        raise _refusal(
            f"bad argument of load: session_options has {', '.join(map(repr, unknown))}\n"
            f"  expected config keys, as in 'session.intra_op.allow_spinning', or attributes: "
            f"{', '.join(sorted(KNOWN_ATTRIBUTES))}",
            hint="load(…, session_options={'intra_op_num_threads': 2})",
        )
    from ortprep.options import format_option

    return (
        {name: _name_of(chosen[name]) for name in chosen if name in KNOWN_ATTRIBUTES},
        {name: format_option(chosen[name]) for name in chosen if "." in name},
    )


def _require_object(chosen: Any) -> None:
    if not isinstance(chosen, import_onnxruntime().SessionOptions):
        raise _refusal(
            f"bad argument of load: session_options={chosen!r}\n"
            "  expected an onnxruntime.SessionOptions, or values by attribute or config key"
        )


def _read_attributes(chosen: Any) -> dict[str, str | int | bool]:
    """Returns the attributes of a `SessionOptions` that are not at their defaults."""
    _require_object(chosen)
    default = import_onnxruntime().SessionOptions()
    names = [name for name in sorted(KNOWN_ATTRIBUTES) if hasattr(default, name)]
    return {
        name: _name_of(getattr(chosen, name))
        for name in names
        if getattr(chosen, name) != getattr(default, name)
    }


def copy_of_options(
    chosen: SessionOptions, session: onnxruntime.InferenceSession, merged: SessionPlan
) -> SessionOptions:
    """Returns an application's options as they are now, for sessions that are made later.

    ONNX Runtime copies an object only for a session that it makes: all but its libraries of custom operators.

    Args:
        chosen: The options, as the application passed them.
        session: A session that was made with them.
        merged: Its plan, as `build_with_options` returned it.
    """
    if isinstance(chosen, Mapping):
        return chosen
    copied: onnxruntime.SessionOptions = session._sess.session_options
    _giving_back(chosen, merged)(copied)
    return copied


def _giving_back(chosen: Any, merged: SessionPlan) -> Callable[[Any], None]:
    """Returns what gives an object the values that `chosen` has now, after a load has set those of a plan.

    ONNX Runtime cannot remove an entry from an object. So entries the load added stay, at a value that means
    the same as none where there is one, and the next load does not take them for the application's.
    """
    record = merged.session_options
    names = (_LEVEL, *(name for name in record.attributes if hasattr(chosen, name)))
    values = {name: getattr(chosen, name) for name in names}
    added = record.config_entries.keys() - own_entries(chosen, record.config_entries).keys()

    def give_back(target: Any) -> None:
        target.set_load_cancellation_flag(False)
        for name, value in values.items():
            setattr(target, name, value)
        for name in added:
            neutral = _neutral_value(name)
            entry = record.config_entries[name] if neutral is None else neutral
            with contextlib.suppress(RuntimeError):  # one that ONNX Runtime refused before
                target.add_session_config_entry(name, entry)
            _ADDED.setdefault(target, {})[name] = entry

    return give_back


def own_entries(chosen: Any, names: Iterable[str]) -> dict[str, str]:
    """Returns those of some config entries that an application set on its `onnxruntime.SessionOptions`.

    Entries that loads added are left out.
    """
    added, entries = _ADDED.get(chosen, {}), {}
    for name in names:
        with contextlib.suppress(RuntimeError):  # ONNX Runtime raises it for an entry that is not set
            entries[name] = chosen.get_session_config_entry(name)
    return {name: value for name, value in entries.items() if added.get(name) != value}


def _neutral_value(name: str) -> str | None:
    """Returns the value of an entry that means the same as none; None where there is no such value."""
    if name in _NEUTRAL:
        return _NEUTRAL[name]
    from ortprep.options import NEWEST, known_session_config

    option = next((option for option in known_session_config(NEWEST) if option.name == name), None)
    if option is None:
        return None
    if option.accepts(""):
        return ""
    if option.accepts(option.default):
        return option.default
    return "" if option.kind == "text" else None


def _name_of(value: Any) -> str | int | bool:
    """Returns an enumeration's member by its name, anything else as it is."""
    value = value.item() if hasattr(value, "item") else value  # a number of numpy's
    return value if isinstance(value, str | int | bool) else str(getattr(value, "name", value))


@functools.lru_cache(maxsize=1024)
def _log_once(line: str) -> None:
    import logging

    logging.getLogger(__name__).warning("%s", line)


def _refusal(message: str, *, hint: str | None = None) -> LoadError:
    from ortprep.errors import LoadError

    return LoadError(message, hint=hint)
