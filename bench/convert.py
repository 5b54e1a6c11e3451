"""What do conversions cost in accuracy, and what do they gain? Builds each model once and reads its manifest.

    python -m bench.convert --exported FOLDER [--models NAME …] [--out FILE.json]

FOLDER is the output of `python -m bench.exported --out FOLDER`. Demo models and the model that overflows by
design need no files. All models have the same `convert` section, without thresholds, precisions or nodes of
their own, and step down its ladder if they must.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from bench.demo_models import write_demo_model
from bench.result_file import describe_machine, format_results
from ortprep.build.build_plan import plan_builds
from ortprep.build.execution import run_task
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.manifest import Manifest, VariantRecord, read_manifest
from ortprep.errors import PipelineError
from ortprep.measuring.shipped import shipped_figures

_ROOT = Path(__file__).parent.parent
_LADDER = ["int8", "fp16", "fp32"]
_COMMON: Mapping[str, Any] = {
    "targets": ["cpu"],
    "tune": {"max_trials": 0},
    # A convolution net with random weights is further from itself once optimised than the usual tolerance.
    "verify": {"rtol": 1e-2, "atol": 1e-4},
}
_FUSED = {"bert-base": "bert", "bert-base-torchscript": "bert", "gpt2": "gpt2", "vit-base": "vit"}
_DEMOS: Mapping[str, Mapping[str, Any]] = {
    "squeezenet": {"data_0": {"shapes": [[1, 3, 224, 224]]}},
    "inception-v2": {"data_0": {"shapes": [[1, 3, 224, 224]]}},
}


def write_specs(folder: Path, exported: Path | None, names: tuple[str, ...], *, rounds: int) -> list[str]:
    """Writes a spec per model, all with the same conversions; returns the names."""
    configs = folder / "configs"
    configs.mkdir()
    found: dict[str, dict[str, Any]] = {}
    for name in _DEMOS:
        found[name] = {"source": {"path": str(write_demo_model(name, folder / f"{name}.onnx").absolute())}}
    for path in sorted((exported / "configs").glob("*.yaml")) if exported else ():
        spec = yaml.safe_load(path.read_text())
        model = (path.parent / spec["source"]["path"]).resolve()
        found[spec["name"]] = {**spec, "source": {"path": str(model)}}
    chosen = [name for name in found if not names or name in names]
    for name in chosen:
        convert: dict[str, Any] = {"precision": ["fp16", "int8"], "ladder": _LADDER}
        if name in _FUSED:
            convert["fusion"] = {"model_type": _FUSED[name], "num_heads": 12, "hidden_size": 768}
        inputs = {"inputs": _DEMOS[name]} if name in _DEMOS else {}
        measure = {"rounds": rounds, "cold_rounds": 0, "steady_s": 0.3}
        more = {**_COMMON, "measure": measure, "convert": convert}
        spec = {**found[name], **inputs, "name": name, **more}
        (configs / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    return chosen


def build(folder: Path, name: str) -> Manifest:
    """Prepares one model.

    Raises:
        PipelineError: The build failed.
    """
    cache = DigestCache()
    (tasks,) = plan_builds(folder / "configs", folder / "artifacts", names=(name,))
    for task in tasks:
        run_task(task, cache=cache, say=lambda line: print(f"  {line}", file=sys.stderr))
    return read_manifest(folder / "artifacts" / name)


def describe(manifest: Manifest) -> dict[str, Any]:
    """Returns a bundle's records of its conversions."""
    variants = {record.name: _describe_variant(manifest, record) for record in manifest.variants}
    left_out = {
        one.variant: {"reason": one.reason, "steps": [step.precision for step in one.conversion.steps]}
        for one in manifest.left_out
        if one.conversion is not None
    }
    return {"variants": variants, "left_out": left_out}


def _describe_variant(manifest: Manifest, record: VariantRecord) -> dict[str, Any]:
    size = sum(file.size_bytes for file in manifest.files if file.path.startswith(f"{record.name}/"))
    conversion, figures = record.conversion, shipped_figures(record)
    described: dict[str, Any] = {"size_mb": round(size / 2**20, 1), "level": record.level}
    if record.accuracy:
        described["snr_db"] = round(min(one.snr_db for one in record.accuracy), 1)
    if conversion is not None:
        described |= {"precision": conversion.precision, "fused": dict(conversion.fused)}
        described["steps"] = [
            {
                "precision": step.precision,
                "outcome": step.outcome.splitlines()[0],
                "kept": len(step.kept),
                "nodes": step.nodes,
                "trials": step.trials,
            }
            for step in conversion.steps
        ]
    if figures is not None:
        named = {"init": figures.init_ms, "first": figures.first_ms, "steady": figures.steady_ms}
        described |= {f"{name}_ms": round(summary.median, 3) for name, summary in named.items()}
        described["private_mb"] = round(figures.private_mb.median, 1)
    return described


def format_rows(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the table, as docs/performance.md has it."""
    yield "| model | variant | became | size MB | SNR dB | init ms | first ms | steady ms |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, result in results.items():
        for variant, one in result.get("variants", {}).items():
            if variant == "portable":
                continue
            cells = (one.get(key, "") for key in ("size_mb", "snr_db", "init_ms", "first_ms", "steady_ms"))
            yield f"| {name} | {variant} | {_became(one)} | {' | '.join(map(str, cells))} |"
        for variant, one in result.get("left_out", {}).items():
            yield f"| {name} | {variant} | left out: {' → '.join(one['steps'])} | | | | | |"
        if "failed" in result:
            yield f"| {name} | FAILED | {result['failed'].splitlines()[0]} | | | | | |"


def _became(one: Mapping[str, Any]) -> str:
    step = one["steps"][-1] if one.get("steps") else None
    if step is None:
        return "fp32"
    kept = f", {step['kept']} of {step['nodes']} nodes kept" if step["kept"] else ""
    return f"{step['precision']}{kept}"


def main() -> None:
    """Runs the benchmark and writes its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--exported", type=Path, help="folder that bench.exported wrote")
    parser.add_argument("--models", nargs="+", default=[], help="these alone")
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes per figure")
    parser.add_argument("--out", type=Path, default=_ROOT / "bench" / "results" / "convert.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="bench-convert-") as name:
        folder = Path(name)
        chosen = write_specs(folder, arguments.exported, tuple(arguments.models), rounds=arguments.rounds)
        for model in chosen:
            try:
                results[model] = describe(build(folder, model))
            except PipelineError as error:
                results[model] = {"failed": error.message}
    document = {"models": results, "machine": describe_machine()}
    arguments.out.write_text(format_results(document) + "\n")
    print("\n".join(format_rows(results)))


if __name__ == "__main__":
    main()
