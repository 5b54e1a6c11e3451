"""Full-size demo models, made offline: real architectures with seeded weights.

The convolution nets are those of the onnx package, which ships them with constant weights; the models of
language are built from scratch. The same versions of onnx, numpy and this generator give the same bytes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortprep.bundle.digest import DigestCache
from ortprep.children.child import run_child
from ortprep.errors import SpecError
from ortprep.quoting import quoted
from ortprep.stages.fetch.transfer import TransferResult

GENERATOR_VERSION = 1
"""Raised by one whenever a demo model would come out different."""

DEMO_NAMES = (
    "alexnet",
    "bert-base",
    "bilstm",
    "densenet121",
    "gpt2",
    "inception-v1",
    "inception-v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)

_SMALLEST = "squeezenet"


def check_demo_name(name: str) -> str:
    """Returns the name of a demo model if there is one.

    Raises:
        SpecError: No demo model has this name.
    """
    if name not in DEMO_NAMES:
        nearest = [*difflib.get_close_matches(name, DEMO_NAMES, n=1), _SMALLEST][0]
        raise SpecError(
            f"unknown demo model: {name!r}\n  expected one of {', '.join(DEMO_NAMES)}",
            hint=f"source: {{demo: {quoted(nearest)}}}",
        )
    return name


def write_demo_model(name: str, path: Path, *, timeout_s: float | None = None) -> TransferResult:
    """Writes a demo model in a child process.

    Raises:
        SpecError: There is no such model.
    """
    request = {"name": check_demo_name(name), "path": str(path)}
    run_child(write_demo, request, timeout_s=timeout_s)
    return TransferResult(path.stat().st_size, DigestCache().digest(path))


def write_demo(request: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a demo model (child)."""
    # Here and not above: the build process never imports onnx.
    from ortprep.stages.fetch.demo.bert import build_bert
    from ortprep.stages.fetch.demo.bilstm import build_bilstm
    from ortprep.stages.fetch.demo.gpt2 import build_gpt2
    from ortprep.stages.fetch.demo.seeded_weights import write_seeded_model
    from ortprep.stages.fetch.demo.vision import build_vision_net

    name = request["name"]
    builders = {"bert-base": build_bert, "bilstm": build_bilstm, "gpt2": build_gpt2}
    build = builders.get(name)
    model, weights = build_vision_net(name) if build is None else build()
    write_seeded_model(Path(request["path"]), model, weights)
    return {}
