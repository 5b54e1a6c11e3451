"""Session options with which ONNX Runtime writes large weights beside a model."""

from __future__ import annotations

from pathlib import Path

MIN_EXTERNAL_BYTES = 16 * 1024
"""Weights from this size on are written to the data file, which is mapped; smaller ones stay in the model.

Each external weight costs an open and a map at load, each inline one a copy. Measured on convolution nets of
5 to 100 MB: 1 KiB to 64 KiB are alike within the noise, 256 KiB is slower and takes more memory. Zero is no
choice at all: shape inference cannot read an external constant, so a graph whose `Reshape` shape is outside
does not load. ONNX Runtime maps them from any offset.
"""

PAGE_BYTES = 4096
"""Offsets of large weights in a converted model's data file are multiples of it."""

DATA_FILE = "session.optimized_model_external_initializers_file_name"
DATA_MIN_BYTES = "session.optimized_model_external_initializers_min_size_in_bytes"


def with_external_data(model: Path) -> dict[str, str]:
    """Returns the session entries that write large weights into a file beside the written model."""
    # A name, not a path: it is taken as relative to the written model, and stands so in it.
    return {DATA_FILE: f"{model.name}.data", DATA_MIN_BYTES: str(MIN_EXTERNAL_BYTES)}
