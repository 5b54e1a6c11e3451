"""What another version of ONNX Runtime does to a bundle and its source."""
