"""`upgrade-check`: a bundle and its source on other versions of ONNX Runtime."""
