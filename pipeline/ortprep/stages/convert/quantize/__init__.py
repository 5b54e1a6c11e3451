"""Quantisation to 8 and 4 bits by ONNX Runtime's quantisers."""
