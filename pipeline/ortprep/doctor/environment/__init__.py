"""`ortprep doctor env`: what ONNX Runtime finds on this machine, and what it misses."""
