"""The recipe of a session, as `loader.json` records it; light enough for the quickest load."""

# Without `from __future__ import annotations`: named tuples compile annotations that are text.
from collections.abc import Mapping
from typing import NamedTuple


class SessionOptionsRecord(NamedTuple):
    """Session options that differ from ONNX Runtime's defaults.

    Attributes:
        graph_optimization_level: Name of a `GraphOptimizationLevel`.
        attributes: Plain attributes of `onnxruntime.SessionOptions` (`intra_op_num_threads`, …).
        config_entries: Arguments of `add_session_config_entry`.
    """

    graph_optimization_level: str
    attributes: Mapping[str, int | bool | str] = {}
    config_entries: Mapping[str, str] = {}


class ProviderRecord(NamedTuple):
    """An execution provider and its options, all values as strings."""

    name: str
    options: Mapping[str, str] = {}


class SessionPlan(NamedTuple):
    """The recipe of one session.

    Attributes:
        model: Absolute path of the ONNX file.
        session_options: Options that differ from ONNX Runtime's defaults.
        providers: Execution providers in order of preference.
    """

    model: str
    session_options: SessionOptionsRecord
    providers: tuple[ProviderRecord, ...]
