"""Session and provider options of ONNX Runtime, per version: type, values, default, effect."""

from ortprep.options.option import NEWEST, OLDEST, Option, format_option, version_parts
from ortprep.options.validation import (
    CUDA,
    Scalar,
    check_attributes,
    check_provider_options,
    check_session_config,
    known_attributes,
    known_provider_options,
    known_session_config,
)

__all__ = [
    "CUDA",
    "NEWEST",
    "OLDEST",
    "Option",
    "Scalar",
    "check_attributes",
    "check_provider_options",
    "check_session_config",
    "format_option",
    "known_attributes",
    "known_provider_options",
    "known_session_config",
    "version_parts",
]
