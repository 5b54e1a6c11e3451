"""What is prepared with AVX-512 and run without it: on another processor, emulated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.bundle.digest import digest_file
from pipeline.bundle.loader_config import (
    LOADER_SCHEMA_VERSION,
    FileEntry,
    Golden,
    LoaderConfig,
    Tolerance,
    Variant,
    write_loader_config,
)
from pipeline.runtime.hardware import read_hardware
from pipeline.runtime.loading import open_bundle
from pipeline.runtime.tensors import write_tensors
from pipeline.stages.results import OptimizeResult
from tests import models
from tests.stages.optimizing import Build

EMULATOR = shutil.which("qemu-x86_64")
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(EMULATOR is None, reason="needs qemu-x86_64 (Debian package qemu-user)"),
    pytest.mark.skipif(
        "avx512f" not in read_hardware(gpus=False).cpu_features,
        reason="needs a processor with AVX-512 to prepare on",
    ),
]

RUN = """
import json, sys
import numpy as np
from pipeline.runtime.hardware import read_hardware
from pipeline.runtime.loading import open_bundle
from pipeline.runtime.session import build_session, default_plan, onnxruntime_errors

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
    "features": read_hardware(gpus=False).cpu_features,
}))
"""


@dataclass(frozen=True)
class Prepared:
    """A bundle, an input for it, and what its source answers."""

    bundle: Path
    image: Path
    expected: Any


def prepare(root: Path, *, channels: int) -> Prepared:
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


def make_variant(bundle: Path, name: str, result: OptimizeResult) -> Variant:
    files = sorted(path for path in (bundle / name).iterdir())
    return Variant(
        name=name,
        target="cpu",
        model=f"{name}/{result.model}",
        files=tuple(make_entry(bundle, f"{name}/{path.name}") for path in files),
        session_options=result.session_options,
        providers=result.providers,
        requirements=result.requirements,
    )


def make_entry(bundle: Path, path: str) -> FileEntry:
    return FileEntry(path, (bundle / path).stat().st_size, digest_file(bundle / path))


def run_on_haswell(prepared: Prepared) -> dict[str, Any]:
    unsafe = prepared.bundle / "cpu" / "net_optimized.onnx"
    arguments = [str(prepared.bundle), str(prepared.image), str(unsafe)]
    done = subprocess.run(
        [str(EMULATOR), "-cpu", "Haswell", sys.executable, "-c", RUN, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module", params=[8, 32], ids=["half a block", "whole blocks"])
def elsewhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    prepared = prepare(tmp_path_factory.mktemp("net"), channels=request.param)
    here = open_bundle(prepared.bundle)
    assert here.variant.name == "cpu", here.passed_over
    return prepared, run_on_haswell(prepared)


def test_the_processor_is_asked_and_not_the_systems_list(elsewhere: tuple[Prepared, dict[str, Any]]) -> None:
    assert "avx2" in elsewhere[1]["features"]
    assert "avx512f" not in elsewhere[1]["features"]


def test_load_takes_the_portable_variant_and_answers_correctly(
    elsewhere: tuple[Prepared, dict[str, Any]],
) -> None:
    prepared, answer = elsewhere
    assert answer["variant"] == "portable"
    assert "avx512f" in answer["passed_over"][0]
    np.testing.assert_allclose(answer["scores"], prepared.expected, rtol=1e-4, atol=1e-6)


def test_without_requirements_the_other_variant_would_fail_or_answer_wrongly(
    elsewhere: tuple[Prepared, dict[str, Any]],
) -> None:
    """It is loud only where channels do not fill a block: microsoft/onnxruntime #26174."""
    prepared, answer = elsewhere
    if isinstance(answer["unsafe"], str):
        assert "block" in answer["unsafe"]
    else:
        assert not np.allclose(answer["unsafe"], prepared.expected, rtol=1e-2)
