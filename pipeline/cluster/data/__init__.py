"""Datasets of Ray Data through a bundle; nodes need nothing of the build.

predictor  `OnnxPredictor`
arguments  what its columns and constants may be
batching   rows to the shapes that a model takes, and back
"""
