"""What a bundle was made with: the `environment` of its manifest, as facts, in words, and for pip. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ortprep.bundle import REQUIREMENTS_FILE

_DISTRIBUTIONS = ("onnxruntime-gpu", "onnxruntime")

_MAX_FACTS = 400
_MAX_FACT_NAME = 100
"""More facts, and with longer names, than any machine has; a manifest may come from a stranger."""


def list_facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of a manifest's `environment` by dotted names, as in `hardware.gpus.0.name`."""
    return dict(itertools.islice(_flatten(environment), _MAX_FACTS))


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the leaves of nested JSON, each name after a dot; a list of plain values is one leaf."""
    is_list = isinstance(value, list | tuple)
    if len(name) > _MAX_FACT_NAME:
        return
    if isinstance(value, Mapping) or (is_list and any(isinstance(one, Mapping) for one in value)):
        for key, one in enumerate(value) if is_list else value.items():
            yield from _flatten(one, f"{name}.{key}")
    elif value is not None:
        separator = "." if name.endswith("compute_capability") else " "
        yield name[1:], separator.join(map(str, value)) if is_list else str(value)


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
