"""Reading ONNX graphs without their weights."""
