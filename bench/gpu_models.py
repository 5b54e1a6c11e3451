"""The models of `bench.gpu_acceptance`, and where they run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.models import demo_specs, find_prepared, prepare_command, write_specs
from ortprep.bundle.loader_config import Variant, find_variant, read_loader_config
from ortprep.bundle.manifest import MANIFEST_FILE, Manifest, VariantRecord, read_manifest
from ortprep.bundle.session_record import SessionPlan
from ortprep.errors import LoadError
from ortprep.runtime.loading.variant_resolver import build_plan

CONV1D = """\
name: conv1d
source: {path: ../conv1d.onnx}
inputs: {x: {shapes: [[1, 64, 4096]]}}
verify: {rtol: 1.0e-2, atol: 1.0e-3}
"""


@dataclass(frozen=True)
class Place:
    """Where the checks run: on the first GPU, or on the CPU to try the script itself.

    Attributes:
        models: Demo models that are checked, an image classifier first.
        target: Target of the variants that are checked.
        device: Device as pools and the doctor name it.
        defaults: Defaults of the specs.
        tune_defaults: Those of the specs that are tuned.
    """

    models: tuple[str, ...]
    target: str
    device: str
    defaults: str
    tune_defaults: str

    @property
    def is_gpu(self) -> bool:
        """Whether this is the real thing."""
        return self.target == "cuda"


GPU = Place(
    ("resnet50", "bert-base"),
    "cuda",
    "cuda:0",
    "targets: [cuda, cpu]\ntune: {max_trials: 0}\nmeasure: {rounds: 5, cold_rounds: 2, steady_s: 0.3}\n",
    "targets: [cuda]\ntune: {budget_s: 45, rounds: 8, steady_s: 0.1}\n",
)
DRY_RUN = Place(
    ("squeezenet",),
    "cpu",
    "cpu",
    "targets: [cpu]\ntune: {max_trials: 0}\nmeasure: {rounds: 3, cold_rounds: 1, steady_s: 0.05}\n",
    "targets: [cpu]\ntune: {max_trials: 4, rounds: 3, steady_s: 0.05}\n",
)


@dataclass(frozen=True)
class Prepared:
    """A bundle made here, and where its samples and receipts are."""

    name: str
    bundle: Path
    manifest: Manifest
    sample: Path
    place: Place

    def variant(self) -> Variant:
        """Returns the target's variant, which must be there."""
        found = find_variant(read_loader_config(self.bundle), self.place.target)
        if found is None:
            raise LoadError(f"no variant {self.place.target} in {self.bundle}")
        return found

    def record(self) -> VariantRecord:
        """Returns what the manifest says of that variant."""
        return next(one for one in self.manifest.variants if one.name == self.place.target)

    def plan(self) -> SessionPlan:
        """Returns how it is loaded."""
        return build_plan(self.bundle, self.variant())


def prepare(root: Path, place: Place) -> tuple[tuple[Prepared, ...], float]:
    """Prepares the models by the command, and returns them with the seconds it took."""
    configs, artifacts = root / "configs", root / "artifacts"
    write_specs(demo_specs(place.models), configs, defaults=place.defaults)
    started = time.perf_counter()
    subprocess.run(prepare_command(configs, artifacts), check=False)
    elapsed_s = time.perf_counter() - started
    made = (name for name in place.models if (artifacts / name / MANIFEST_FILE).exists())
    return tuple(_read_prepared(name, artifacts, place) for name in made), elapsed_s


def _read_prepared(name: str, artifacts: Path, place: Place) -> Prepared:
    found = find_prepared(name, artifacts)
    return Prepared(name, found.bundle, read_manifest(found.bundle), found.sample, place)


def write_conv1d(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function: writes eight 1-D convolutions of 64 channels, seeded weights, to `path`."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights, nodes = [], []
    for layer in range(8):
        kernel = (rng.standard_normal((64, 64, 9)) / 24).astype(np.float32)
        weights.append(numpy_helper.from_array(kernel, f"w{layer}"))
        source = f"r{layer - 1}" if layer else "x"
        nodes.append(helper.make_node("Conv", [source, f"w{layer}"], [f"c{layer}"], pads=[4, 4]))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]))
    shape = [1, 64, 4096]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "r7"))
    graph = helper.make_graph(nodes, "conv1d", [x], [y], weights)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), request["path"]
    )
    return {}
