"""A spec for a model file: what its graph says, a trial run, and YAML with the reason of every value."""

from __future__ import annotations

from ortprep.init.draft import InitResult, choose_name, find_spec_name, init_spec
from ortprep.init.input_search import ObservedInput

__all__ = [
    "InitResult",
    "ObservedInput",
    "choose_name",
    "find_spec_name",
    "init_spec",
]
