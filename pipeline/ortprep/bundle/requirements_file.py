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


def describe_need(environment: Mapping[str, Any], *, on_gpu: bool) -> str:
    """Returns which ONNX Runtime the jobs of a bundle need, in words.

    Args:
        environment: The manifest's.
        on_gpu: Whether a variant of the bundle needs a GPU, and with it the package that has its provider.
    """
    pin = pin_onnxruntime(environment)
    if on_gpu:
        return f"{pin}, as in its {REQUIREMENTS_FILE}"
    version, either = pin.partition("==")[2], " or ".join(sorted(_DISTRIBUTIONS))
    return f"ONNX Runtime {version} ({either}); its {REQUIREMENTS_FILE} has {pin}"


def format_requirements(name: str, environment: Mapping[str, Any]) -> str:
    """Returns the content of the file for the bundle `name`."""
    return (
        f"# The ONNX Runtime that {name} was prepared with. Other versions may get its portable variant,\n"
        "# which starts more slowly. Jobs also need ortprep itself.\n"
        f"{pin_onnxruntime(environment)}\n"
    )
