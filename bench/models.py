"""The models of the benchmarks, and how to prepare them with `ortprep prepare`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.demo_models import write_demo_model
from bench.language import LANGUAGE_MODELS, write_language_model
from ortprep.build.receipts import read_receipt, receipt_path, task_folder
from ortprep.bundle.codec import decode
from ortprep.bundle.loader_config import LOADER_SCHEMA_VERSION, read_loader_config
from ortprep.errors import BundleError, StageError
from ortprep.stages.core.contract import TaskId
from ortprep.stages.core.results import FetchResult
from ortprep.stages.verify.reference import read_reference

ARTIFACTS = Path(os.environ.get("ORTPREP_BENCH_MODELS", "artifacts/bench"))
"""Folder of models and bundles that benchmarks share and keep between runs."""

# The build's own comparison is not what a benchmark reports, so it is kept as short as it may be.
DEFAULTS = """\
targets: [cpu]
tune: {max_trials: 0}
measure: {rounds: 5, cold_rounds: 0, steady_s: 0.1}
"""

_PIXELS = "inputs:\n  {input}: {{shapes: [[1, 3, 224, 224]], range: [0, 1]}}\n"

_TOKENS = """\
inputs:
  input_ids: {shapes: [[1, 128]]}
  attention_mask: {shapes: [[1, 128]], values: [1]}
  token_type_ids: {shapes: [[1, 128]]}
"""

_CAUSAL_TOKENS = """\
inputs:
  input_ids: {shapes: [[1, 128]]}
  attention_mask: {shapes: [[1, 128]], values: [1]}
"""

_WORDS = """\
inputs:
  input_ids: {shapes: [[1, 128]]}
"""

SPECS = {
    "resnet50": _PIXELS.format(input="gpu_0/data_0"),
    "densenet121": _PIXELS.format(input="data_0"),
    "vgg19": _PIXELS.format(input="data_0"),
    "inception-v2": _PIXELS.format(input="data_0"),
    "squeezenet": _PIXELS.format(input="data_0"),
    "bert-base": _TOKENS,
    "gpt2": _CAUSAL_TOKENS,
    "bilstm": _WORDS,
}
"""What a spec says besides its name and its demo source, by name of both."""


@dataclass(frozen=True)
class PreparedModel:
    """A prepared model.

    Attributes:
        name: Name of the bundle.
        source: The model file as fetched.
        bundle: Folder of the bundle.
        sample: `.npz` with one array per input.
    """

    name: str
    source: Path
    bundle: Path
    sample: Path


def prepare_specs(
    specs: Mapping[str, str], artifacts: Path, *, defaults: str, reuse: bool = False
) -> tuple[PreparedModel, ...]:
    """Builds bundles with the command that users run; does nothing for those that are up to date.

    Args:
        specs: What a spec says besides its name, by name.
        artifacts: Folder of bundles; kept between runs. Specs are written below it.
        defaults: Text of `defaults.yaml`.
        reuse: Whether bundles of today's format are taken as they are, though the code may have changed.

    Raises:
        StageError: The command failed; its output says why.
    """
    missing = [name for name in specs if not (reuse and _has_todays_format(artifacts / name))]
    if missing:
        configs = artifacts / "configs"
        write_specs(specs, configs, defaults=defaults)
        command = prepare_command(configs, artifacts, missing)
        if subprocess.run(command, check=False).returncode:
            raise StageError(f"cannot prepare {', '.join(missing)}", hint=" ".join(command))
    return tuple(find_prepared(name, artifacts) for name in specs)


def _has_todays_format(bundle: Path) -> bool:
    try:
        return read_loader_config(bundle).schema_version == LOADER_SCHEMA_VERSION
    except BundleError:
        return False


def demo_specs(names: Iterable[str]) -> dict[str, str]:
    """Returns what the specs of the models of `SPECS` say besides their names, by name."""
    return {name: f"source: {source_of(name)}\n{SPECS[name]}" for name in names}


def source_of(name: str) -> str:
    """Writes a model of `SPECS`, and returns the source for its spec, in YAML."""
    path = Path("bench/out/models") / f"{name}.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    (write_language_model if name in LANGUAGE_MODELS else write_demo_model)(name, path)
    return f"{{path: {json.dumps(str(path.absolute()))}}}"


def write_specs(specs: Mapping[str, str], configs: Path, *, defaults: str) -> None:
    """Writes specs, by name, and the text of `defaults.yaml` into a folder; creates the folder."""
    configs.mkdir(parents=True, exist_ok=True)
    (configs / "defaults.yaml").write_text(defaults, encoding="utf-8")
    for name, spec in specs.items():
        (configs / f"{name}.yaml").write_text(f"name: {name}\n{spec}", encoding="utf-8")


def prepare_command(configs: Path, artifacts: Path, names: Sequence[str] = ()) -> list[str]:
    """Returns the command that builds the bundles of a folder of specs, or those of some names."""
    folders = ["--configs", str(configs), "--artifacts", str(artifacts)]
    return [sys.executable, "-m", "ortprep", "prepare", *names, *folders]


def find_prepared(name: str, artifacts: Path) -> PreparedModel:
    """Returns a model that was prepared for the CPU, perhaps among other targets.

    Raises:
        StageError: It was not.
        BundleError: What its build left cannot be read.
    """
    fetch = TaskId("fetch")
    receipt = read_receipt(receipt_path(artifacts, name, fetch))
    if receipt is None:
        raise StageError(
            f"no receipt of {fetch} of {name}", hint="remove the benchmark's artifacts and run again"
        )
    reference = read_reference(task_folder(artifacts, name, TaskId("verify", "cpu")))
    return PreparedModel(
        name=name,
        source=task_folder(artifacts, name, fetch) / decode(FetchResult, receipt.result).model,
        bundle=artifacts / name,
        sample=reference.samples[0].path,
    )
