"""ONNX Runtime's model packages, written with its own `onnxruntime.ModelPackage` (since 1.32)."""
