"""Bundles laid out for what serves them elsewhere: NVIDIA Triton, and ONNX Runtime's model packages.

Each layout is a pure plan (what of a variant it can say, and what it cannot) and a thin shell that writes it.
"""
