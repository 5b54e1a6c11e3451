"""ONNX models from exported to serving: prepare once, load in milliseconds.

Runtime jobs import `ortprep.runtime`; the build is driven by `doit prepare` or `ortprep prepare`.
"""

__version__ = "0.1.0"
