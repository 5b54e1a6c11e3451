"""Models as PyTorch's exporter writes them: what conversions are measured on.

    python -m bench.exported --out FOLDER [NAME…]

writes `FOLDER/NAME.onnx` and `FOLDER/configs/NAME.yaml`. Architectures with seeded weights, made offline; the
interpreter needs torch, onnxscript and transformers (`pip install ortprep[bench]`).
"""
