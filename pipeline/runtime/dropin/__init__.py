"""Bundles for applications that make their own sessions: `session`, `install`, and what `ortprep run` starts.

import_hook    runs a function as soon as a process has imported ONNX Runtime
launch         starts a program with such a function
"""
