"""The application's own session options beside a bundle's: the application's win.

Only the optimisation level is always the bundle's, whose graph was prepared for it; ONNX Runtime does not
tell a level that was chosen from its default.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.bundle.session_record import SessionPlan
from pipeline.errors import LoadError
from pipeline.options import NEWEST, format_option, known_session_config
from pipeline.runtime.loading.session import KNOWN_ATTRIBUTES, build_session, import_onnxruntime

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.runtime.cancellation import Cancellation
    from pipeline.runtime.loading.bundle_loader import SessionOptions

log = logging.getLogger(__name__)

_LEVEL = "graph_optimization_level"
_LOCK = threading.Lock()
_ADDED: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
"""Entries that loads added to an application's object: none can be removed, and they are not its own."""

_said: set[str] = set()


def build_with_options(
    plan: SessionPlan,
    given: SessionOptions,
    *,
    timeout_s: float | None,
    cancellation: Cancellation | None,
) -> tuple[SessionPlan, onnxruntime.InferenceSession]:
    """Makes the session of a plan with the application's options, which stay as they are.

    Args:
        plan: The bundle's.
        given: The application's options.
        timeout_s: As for `build_session`.
        cancellation: As for `build_session`.

    Returns:
        The plan with the application's options, and the session.

    Raises:
        LoadError: An option is none, or ONNX Runtime refused it; else as `build_session`.
    """
    merged = merge_options(plan, given)
    if isinstance(given, Mapping):
        return merged, build_session(merged, timeout_s=timeout_s, cancellation=cancellation)
    with _borrowed(given, merged) as options:
        session = build_session(merged, timeout_s=timeout_s, cancellation=cancellation, base_options=options)
    return merged, session


def merge_options(plan: SessionPlan, given: SessionOptions) -> SessionPlan:
    """Returns a plan with the application's options; what they contradict is logged, once for each.

    Raises:
        LoadError: An option is none of ONNX Runtime's session options.
    """
    attributes, entries = split_options(given)
    record = plan.session_options
    contradicted = [
        f"{name}={theirs[name]!r} instead of {value!r}"
        for ours, theirs in ((record.attributes, attributes), (record.config_entries, entries))
        for name, value in ours.items()
        if name in theirs and format_option(theirs[name]) != format_option(value)
    ]
    if contradicted:
        _say_once(f"{plan.model}: the application's session options win: {', '.join(contradicted)}")
    options = record._replace(
        attributes={**record.attributes, **attributes}, config_entries={**record.config_entries, **entries}
    )
    return plan._replace(session_options=options)


def split_options(given: SessionOptions) -> tuple[dict[str, str | int | bool], dict[str, str]]:
    """Returns the attributes and the config entries that an application chose.

    Of an `onnxruntime.SessionOptions` that is every attribute that is not at its default, and every entry
    that the table of options knows; its other entries stay in the object.

    Raises:
        LoadError: An option is none of ONNX Runtime's session options.
    """
    if not isinstance(given, Mapping):
        return _read_attributes(given), _read_entries(given)
    unknown = [name for name in given if "." not in name and name not in (*KNOWN_ATTRIBUTES, _LEVEL)]
    if unknown:
        raise LoadError(
            f"bad argument of load: session_options has {', '.join(map(repr, unknown))}\n"
            f"  expected config keys, as in 'session.intra_op.allow_spinning', or attributes: "
            f"{', '.join(sorted(KNOWN_ATTRIBUTES))}",
            hint="load(…, session_options={'intra_op_num_threads': 2})",
        )
    return (
        {name: _name_of(given[name]) for name in given if name in KNOWN_ATTRIBUTES},
        {name: format_option(given[name]) for name in given if "." in name},
    )


def _read_attributes(given: Any) -> dict[str, str | int | bool]:
    default = import_onnxruntime().SessionOptions()
    if not isinstance(given, type(default)):
        raise LoadError(
            f"bad argument of load: session_options={given!r}\n"
            "  expected an onnxruntime.SessionOptions, or values by attribute or config key"
        )
    names = [name for name in sorted(KNOWN_ATTRIBUTES) if hasattr(default, name)]
    return {
        name: _name_of(getattr(given, name))
        for name in names
        if getattr(given, name) != getattr(default, name)
    }


def _read_entries(given: Any) -> dict[str, str]:
    added, found = _ADDED.get(given, {}), {}
    for option in known_session_config(NEWEST):
        with contextlib.suppress(RuntimeError):  # ONNX Runtime raises it for an entry that is not set
            found[option.name] = given.get_session_config_entry(option.name)
    return {name: value for name, value in found.items() if added.get(name) != value}


@contextlib.contextmanager
def _borrowed(given: Any, merged: SessionPlan) -> Iterator[Any]:
    """Lends an application's object to a load, and gives it back as it was.

    ONNX Runtime can neither copy the object nor remove an entry from it. So entries the load added stay, at
    the value they have where nothing is set, and the next load knows that they are not the application's.
    """
    record, own = merged.session_options, _read_entries(given)
    defaults = {option.name: option.default for option in known_session_config(NEWEST)}
    with _LOCK:
        before = {name: getattr(given, name) for name in (_LEVEL, *record.attributes)}
        try:
            yield given
        finally:
            for name, value in before.items():
                setattr(given, name, value)
            given.set_load_cancellation_flag(False)
            for name in record.config_entries.keys() - own.keys():
                default = defaults.get(name, "")
                if default in ("0", "1"):
                    given.add_session_config_entry(name, default)
                    _ADDED.setdefault(given, {})[name] = default
                else:
                    _ADDED.setdefault(given, {})[name] = record.config_entries[name]


def _name_of(value: Any) -> str | int | bool:
    """Returns an enumeration's member by its name, anything else as it is."""
    if isinstance(value, str | int | bool):
        return value
    return str(getattr(value, "name", value))


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        log.warning("%s", line)
