"""Datasets of Ray Data through a bundle; nodes need nothing of the build.

predictor  `OnnxPredictor`
batching   rows to the shapes that a model takes, and back
"""
