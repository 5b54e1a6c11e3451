"""The application's own session options beside a bundle's: the application's win.

Only the optimisation level is always the bundle's, whose graph was prepared for it. An
`onnxruntime.SessionOptions` is read once, into values by attribute or config key, and never changed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ortprep.bundle.session_record import SessionPlan
from ortprep.runtime.loading.session import KNOWN_ATTRIBUTES, import_onnxruntime

if TYPE_CHECKING:
    from ortprep.errors import LoadError
    from ortprep.runtime.loading.load_options import SessionOptions

Values = Mapping[str, str | int | bool]
"""Options by attribute or config key, enumerations by the names of their members."""

_LEVEL, _DEFAULT_LEVEL = "graph_optimization_level", "ORT_ENABLE_ALL"

_ADD_ENTRY = "add_session_config_entry"

_GRAPH_METHODS = (
    "add_external_initializers",
    "add_external_initializers_from_files_in_memory",
    "add_free_dimension_override_by_denotation",
    "add_free_dimension_override_by_name",
    "add_initializer",
)
"""Methods of `onnxruntime.SessionOptions` that change the graph, whose effect cannot be read back."""

_CALLS: weakref.WeakKeyDictionary[Any, set[tuple[str, Any]]] = weakref.WeakKeyDictionary()
"""Methods that were called of each object since `watch_options`; with an entry's, the entry's name."""


def watch_options(onnxruntime: Any) -> None:
    """Has `onnxruntime.SessionOptions` note which entries are added, and which methods change the graph."""
    kind = onnxruntime.SessionOptions
    for name in ("__init__", _ADD_ENTRY, *_GRAPH_METHODS):
        method = getattr(kind, name, None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(kind, name, _noting(method, name))


def _noting(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(options: Any, *arguments: Any, **named: Any) -> Any:
        returned = method(options, *arguments, **named)
        entry = arguments[0] if name == _ADD_ENTRY else None  # pybind11's takes no named arguments here
        _CALLS.setdefault(options, set()).add((name, entry))
        return returned

    return noting


def find_graph_calls(options: Any) -> list[str]:
    """Returns which methods that change the graph were called of an `onnxruntime.SessionOptions`."""
    return sorted({name for name, _ in _CALLS.get(options, ())}.intersection(_GRAPH_METHODS))


def read_options(chosen: SessionOptions) -> dict[str, str | int | bool]:
    """Returns an application's options as values, as they are now.

    Of an `onnxruntime.SessionOptions` that is every attribute that is not at its default, and every entry
    that was noted; of one that was made before `watch_options`, every entry that the table of options knows.

    Raises:
        LoadError: ONNX Runtime has no such session option.
    """
    if not hasattr(chosen, "items"):
        return _read_object(chosen)
    known = (*KNOWN_ATTRIBUTES, _LEVEL)
    values = dict(chosen.items())
    unknown = [
        name for name in values if not isinstance(name, str) or ("." not in name and name not in known)
    ]
    if unknown:
        raise _refuse(f"session_options has {', '.join(map(repr, unknown))}")
    return {name: _name_of(value) for name, value in values.items()}


def _refuse(problem: str) -> LoadError:
    from ortprep.errors import LoadError

    return LoadError(
        f"bad argument of load: {problem}\n  expected an onnxruntime.SessionOptions, config keys, as in "
        f"'session.intra_op.allow_spinning', or attributes: {', '.join(sorted(KNOWN_ATTRIBUTES))}",
        hint="load(…, session_options={'intra_op_num_threads': 2})",
    )


def _read_object(chosen: Any) -> dict[str, str | int | bool]:
    onnxruntime = import_onnxruntime()
    if not isinstance(chosen, onnxruntime.SessionOptions):
        raise _refuse(f"session_options={chosen!r}")
    default = onnxruntime.SessionOptions()
    names = [name for name in sorted((*KNOWN_ATTRIBUTES, _LEVEL)) if hasattr(default, name)]
    attributes = {
        name: _name_of(getattr(chosen, name))
        for name in names
        if getattr(chosen, name) != getattr(default, name)
    }
    return {**attributes, **read_entries(chosen, _entry_names(chosen))}


def _entry_names(chosen: Any) -> Iterable[str]:
    """Returns the names of the config entries that an application's object may have."""
    calls = _CALLS.get(chosen, set())
    if ("__init__", None) in calls:
        return sorted(entry for name, entry in calls if name == _ADD_ENTRY)
    from ortprep.options import NEWEST, known_options

    return [option.name for option in known_options("session", NEWEST)]


def read_entries(chosen: Any, names: Iterable[str]) -> dict[str, str]:
    """Returns those of some config entries that an `onnxruntime.SessionOptions` has."""
    entries = {}
    for name in names:
        with contextlib.suppress(RuntimeError):  # ONNX Runtime raises it for an entry that is not set
            entries[name] = chosen.get_session_config_entry(name)
    return entries


def split_options(values: Values) -> tuple[dict[str, str | int | bool], dict[str, str]]:
    """Returns the attributes and the config entries of what `read_options` returned, without the level."""
    return (
        {name: value for name, value in values.items() if name in KNOWN_ATTRIBUTES},
        {name: _format(value) for name, value in values.items() if "." in name},
    )


def merge_options(plan: SessionPlan, values: Values) -> SessionPlan:
    """Returns a plan with the application's options; what they contradict is logged, once for each."""
    record = plan.session_options
    attributes, entries = split_options(values)
    contradictions = [
        f"{name}={theirs[name]!r} instead of {value!r}"
        for ours, theirs in ((record.attributes, attributes), (record.config_entries, entries))
        for name, value in ours.items()
        if name in theirs and _format(theirs[name]) != _format(value)
    ]
    if contradictions:
        _log_once(f"{plan.model}: the application's session options win: {', '.join(contradictions)}")
    level = values.get(_LEVEL, _DEFAULT_LEVEL)
    if level not in (_DEFAULT_LEVEL, record.graph_optimization_level):
        _log_once(f"{plan.model}: {_LEVEL} stays {record.graph_optimization_level}, not {level}")
    options = record._replace(
        attributes={**record.attributes, **attributes}, config_entries={**record.config_entries, **entries}
    )
    return plan._replace(session_options=options)


def _name_of(value: Any) -> str | int | bool:
    """Returns an enumeration's member by its name, anything else as it is."""
    value = value.item() if hasattr(value, "item") else value  # a number of numpy's
    return value if isinstance(value, str | int | bool) else str(getattr(value, "name", value))


def _format(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


@functools.lru_cache(maxsize=1024)
def _log_once(line: str) -> None:
    import logging

    logging.getLogger(__name__).warning("%s", line)
