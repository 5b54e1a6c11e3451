"""NVIDIA Triton's model repository, for its ONNX Runtime backend.

What the backend takes is read from its source: triton-inference-server/onnxruntime_backend at 00fd3e8, after
release 26.06, `src/onnxruntime.cc`. The model configuration is Triton's own protobuf message.
"""
