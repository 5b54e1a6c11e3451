"""ONNX Runtime's model packages.

The rules are those it publishes in microsoft/onnxruntime, `model_package/README.md` and
`onnxruntime/core/session/model_package/README.md`. What these leave open was tried on ONNX Runtime 1.31.1,
whose C interface reads packages.
"""
