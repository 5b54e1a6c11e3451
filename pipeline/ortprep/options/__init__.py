"""Session and provider options of ONNX Runtime, per version: type, values, default, effect."""

from ortprep.options.option import NEWEST, OLDEST, Option, format_option, version_parts
from ortprep.options.validation import CUDA, Scalar, check_options, known_options

__all__ = [
    "CUDA",
    "NEWEST",
    "OLDEST",
    "Option",
    "Scalar",
    "check_options",
    "format_option",
    "known_options",
    "version_parts",
]
