"""Models as PyTorch's exporter writes them, to measure conversions.

    python -m bench.exported --out FOLDER [NAME…]

writes `FOLDER/NAME.onnx` and `FOLDER/configs/NAME.yaml`. The architectures have seeded weights and are
generated offline; the interpreter needs torch, onnxscript and transformers (`pip install -e '.[bench]'`).
"""
