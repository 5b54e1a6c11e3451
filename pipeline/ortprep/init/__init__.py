"""A spec for a model file: what its graph says, a trial run, and YAML with the reason of every value."""

from __future__ import annotations

from ortprep.init.draft import InitResult, choose_name, find_spec_name, init_spec, refuse_specs_link
from ortprep.init.input_search import ObservedInput
from ortprep.init.tensor_copy import refresh_tensor_copy

__all__ = [
    "InitResult",
    "ObservedInput",
    "choose_name",
    "find_spec_name",
    "init_spec",
    "refresh_tensor_copy",
    "refuse_specs_link",
]
