"""Does ONNX Runtime keep the interpreter to itself while it loads, initialises and runs? (`check.py`)."""
