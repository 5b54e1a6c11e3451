"""Models as the stage prepares them, and their runs on a processor that is emulated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import (
    LOADER_SCHEMA_VERSION,
    FileEntry,
    Golden,
    LoaderConfig,
    Tolerance,
    write_loader_config,
)
from ortprep.bundle.manifest import SourceRecord
from ortprep.runtime.loading.bundle_loader import open_bundle
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import Context, Plan, TaskId, Upstream
from ortprep.stages.core.results import FetchResult, PreparedResult
from ortprep.stages.fetch.inspection import inspect_model
from ortprep.stages.optimize.stage import OptimizeStage
from tests import builders as models

ROOT = Path(__file__).resolve().parents[3]

RUN = """
import json, logging, sys
import numpy as np
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.loading.bundle_loader import open_bundle
from ortprep.runtime.loading.session import build_session, default_plan, onnxruntime_errors

warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("ortprep").addHandler(handler)
bundle, image, unsafe = sys.argv[1:]
feeds = {"image": np.load(image)}
opened = open_bundle(bundle)
try:
    raw = build_session(default_plan(unsafe, level="ORT_DISABLE_ALL")).run(None, feeds)[0].tolist()
except onnxruntime_errors() as error:
    raw = str(error)
print(json.dumps({
    "variant": opened.variant.name,
    "passed_over": [str(variant) for variant in opened.passed_over],
    "scores": opened.session.run(None, feeds)[0].tolist(),
    "unsafe": raw,
    "level": opened.session.get_session_options().graph_optimization_level.name,
    "warnings": warnings,
    "features": read_hardware(gpus=False).cpu_features,
}))
"""


@dataclass(frozen=True)
class Prepared:
    """A bundle, an input for it, and what its source answers."""

    bundle: Path
    image: Path
    expected: Any


def prepare(root, *, channels):
    bundle = root / "bundle"
    variants, model = [], models.conv_net(channels=channels)
    for name in ("cpu", "portable"):
        build = Build(root / name)
        models.write_model(model, build.source / "model.onnx")
        result = build.optimize(name, inputs={"image": {"shapes": [[1, 3, 16, 16]]}})
        shutil.copytree(build.folder, bundle / name)
        variants.append(make_variant(bundle, name, result))
    image = np.random.default_rng(7).standard_normal((1, 3, 16, 16), np.float32)
    write_tensors(bundle / "golden.npz", {"input:image": image})
    golden = Golden(make_entry(bundle, "golden.npz"), Tolerance(1e-3, 1e-5))
    fetched = build.fetched().interface
    write_loader_config(
        bundle,
        LoaderConfig(LOADER_SCHEMA_VERSION, "net", fetched.inputs, fetched.outputs, golden, tuple(variants)),
    )
    np.save(root / "image.npy", image)
    answers = open_bundle(bundle, target="portable").session.run(None, {"image": image})
    return Prepared(bundle, root / "image.npy", answers[0])


def make_variant(bundle, name, result):
    files = sorted(path for path in (bundle / name).iterdir())
    return result.variant._replace(
        model=f"{name}/{result.variant.model}",
        files=tuple(make_entry(bundle, f"{name}/{path.name}") for path in files),
    )


def make_entry(bundle, path):
    return FileEntry(path, (bundle / path).stat().st_size, digest_file(bundle / path))


def run_elsewhere(prepared, command):
    """Loads and runs the bundle in another process, and returns what `RUN` prints.

    Args:
        prepared: The bundle.
        command: The interpreter, and what emulates its processor before it.
    """
    unsafe = prepared.bundle / "cpu" / "net_optimized.onnx"
    path = (ROOT, os.environ.get("PYTHONPATH"))
    done = subprocess.run(
        [*command, "-c", RUN, str(prepared.bundle), str(prepared.image), str(unsafe)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_falls_back(prepared, answer, *, reason):
    """Fails unless the fallback was loaded, said once, optimised in full, and answered correctly."""
    assert answer["variant"] == "portable"
    (warning,) = answer["warnings"]
    assert "taking variant portable" in warning
    assert reason in warning
    assert answer["level"] == "ORT_ENABLE_ALL"
    np.testing.assert_allclose(answer["scores"], prepared.expected, rtol=1e-4, atol=1e-6)


class Build:
    """A fetched model, and what optimising it comes to."""

    def __init__(self, root):
        self.source = root / "fetch"
        self.folder = root / "optimize"
        self.said = []

    def optimize(self, variant="cpu", **spec):
        context = self.context(variant, spec)
        self.folder.mkdir()
        stage = OptimizeStage()
        result = stage.run(context)
        return decode(PreparedResult, json.loads(json.dumps(result, allow_nan=False)))

    def context(self, variant, spec):
        model = ModelSpec.model_validate({"name": "net", "source": {"path": "model.onnx"}, **spec})
        return Context(
            plan=Plan(model.located_in(self.source), ("cpu",)),
            variant=variant,
            upstream={TaskId("fetch"): Upstream(self.source, encode(self.fetched()))},
            folder=self.folder,
            say=self.said.append,
        )

    def fetched(self):
        found = inspect_model((str(self.source / "model.onnx"), "net"))
        record = SourceRecord(
            kind="path",
            location="model.onnx",
            sha256=digest_file(self.source / "model.onnx"),
            files=tuple(
                FileEntry(path.relative_to(self.source).as_posix(), path.stat().st_size, digest_file(path))
                for path in sorted(self.source.rglob("*"))
                if path.is_file()
            ),
            opsets=found.opsets,
            ir_version=found.ir_version,
            operators=found.operators,
            initializer_bytes=found.initializer_bytes,
        )
        return FetchResult("model.onnx", record, found.interface)

    def files(self):
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
