"""Full-size demo models, made offline: real architectures with seeded weights.

The convolution nets are those of the onnx package, which ships them with constant weights; the models of
language are built from scratch. The same versions of onnx, numpy and this generator give the same bytes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.bundle.digest import DigestCache
from pipeline.errors import SpecError
from pipeline.runtime.child import run_child
from pipeline.stages.fetch.transfer import Received

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
        SpecError: There is none.
    """
    if name not in DEMO_NAMES:
        nearest = [*difflib.get_close_matches(name, DEMO_NAMES, n=1), _SMALLEST][0]
        raise SpecError(
            f"unknown demo model: {name!r}\n  expected one of {', '.join(DEMO_NAMES)}",
            hint=f"source: {{demo: {nearest}}}",
        )
    return name


def write_demo_model(name: str, path: Path, *, timeout_s: float | None = None) -> Received:
    """Writes a demo model in a child process.

    Args:
        name: One of `DEMO_NAMES`.
        path: The new file.
        timeout_s: Deadline of the child.

    Raises:
        SpecError: There is no such model.
    """
    request = {"name": check_demo_name(name), "path": str(path)}
    run_child("pipeline.stages.demo.catalogue:write_demo", request, timeout_s=timeout_s)
    return Received(path.stat().st_size, DigestCache().digest(path))


def write_demo(request: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a demo model (child).

    Args:
        request: `name`, one of `DEMO_NAMES`, and `path`, the new file.
    """
    # Here and not above: the build process never imports onnx.
    from pipeline.stages.demo.bert import build_bert
    from pipeline.stages.demo.bilstm import build_bilstm
    from pipeline.stages.demo.gpt2 import build_gpt2
    from pipeline.stages.demo.seeded_weights import write_seeded_model
    from pipeline.stages.demo.vision import build_vision_net

    name = request["name"]
    builders = {"bert-base": build_bert, "bilstm": build_bilstm, "gpt2": build_gpt2}
    build = builders.get(name)
    model, weights = build_vision_net(name) if build is None else build()
    write_seeded_model(Path(request["path"]), model, weights)
    return {}
