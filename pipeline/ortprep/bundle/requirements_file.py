"""`requirements.txt` of a bundle: the ONNX Runtime that its variants were prepared with, as pip takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REQUIREMENTS_FILE = "requirements.txt"

_DISTRIBUTIONS = ("onnxruntime-gpu", "onnxruntime")


def pin_onnxruntime(environment: Mapping[str, Any]) -> str:
    """Returns the pin of ONNX Runtime, `onnxruntime-gpu==1.31.1` say, from a manifest's `environment`."""
    packages = environment.get("packages")
    installed = packages if isinstance(packages, Mapping) else {}
    name = next((name for name in _DISTRIBUTIONS if name in installed), "onnxruntime")
    return f"{name}=={installed.get(name, environment.get('onnxruntime', '?'))}"


def format_requirements(name: str, environment: Mapping[str, Any]) -> str:
    """Returns the content of the file for the bundle `name`."""
    return (
        f"# The ONNX Runtime that {name} was prepared with. Other versions may get its portable variant,\n"
        "# which starts more slowly. Jobs also need ortprep itself.\n"
        f"{pin_onnxruntime(environment)}\n"
    )
