"""Fourth stage: default ONNX Runtime against what was prepared, and what is shipped."""
