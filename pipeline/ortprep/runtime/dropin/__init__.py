"""Bundles for applications that make their own sessions: `session`, `install`, and what `ortprep run` starts.

import_hook      runs a function as soon as a process has imported ONNX Runtime
launch           starts a program with such a function
session          puts a class in the place of `onnxruntime.InferenceSession`; its sessions may be of a bundle
session_request  what an application requests of a session, and what no bundle can give
source_index     which bundles there are, and of which models
"""
