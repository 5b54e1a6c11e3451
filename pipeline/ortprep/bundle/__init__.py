"""The on-disk contract between the build and the jobs; see docs/format.md."""

LOADER_FILE = "loader.json"
"""Name of a bundle's loader config: here, as what reads it would take milliseconds to import."""

REQUIREMENTS_FILE = "requirements.txt"
"""File with the ONNX Runtime that a bundle's variants were prepared with, as pip takes it."""
