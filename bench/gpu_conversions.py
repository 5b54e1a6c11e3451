"""What does half precision gain on a GPU? `python -m bench.gpu_conversions [--out FILE.json]`.

Measures ResNet-50 with a free batch in fp32 and fp16, by batch size: init, first run, steady run and
throughput. Also measures the effect of `cudnn_conv_use_max_workspace` and `prefer_nhwc` on each, and reports
what fp16 keeps in fp32 of a net that overflows in fp16. One fresh process per figure, interleaved,
medians. `--target cpu` runs everything except the CUDA options: it tests the script and says nothing about a
GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.models import prepare_command
from bench.result_file import describe_machine, format_results
from ortprep.bundle.loader_config import find_variant, read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.availability import unavailable_reason
from ortprep.children.child import run_child
from ortprep.children.probe import ProbeRequest, ProbeResult, measure_plan
from ortprep.runtime.loading.session import CUDA
from ortprep.runtime.loading.variant_resolver import build_plan

BATCHES = (1, 8, 32, 128)
ROUNDS = 3
TIMEOUT_S = 300.0
OPTIONS = ("cudnn_conv_use_max_workspace", "prefer_nhwc")

_SPECS = """\
name: {name}
source: {{path: ../{name}.onnx}}
targets: [{target}]
inputs: {inputs}
convert: {{precision: [fp16]}}
verify: {{rtol: 1.0e-2, atol: 1.0e-3}}
tune: {{max_trials: 0}}
measure: {{rounds: 3, cold_rounds: 0, steady_s: 0.2}}
"""


def write_models(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function: writes ResNet-50 with a free batch, the overflowing net, and inputs, to `folder`."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    from bench.demo_models import write_demo_model
    from ortprep.runtime.tensors.arrays import write_tensors
    from tests.stages.convert.builders import overflowing_net

    folder = Path(request["folder"])
    write_demo_model("resnet50", folder / "resnet50.onnx")
    model = onnx.load(folder / "resnet50.onnx")
    (image,) = [value for value in model.graph.input if value.name == "gpu_0/data_0"]
    for value in (image, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    (shape,) = [tensor for tensor in model.graph.initializer if tensor.name == "OC2_DUMMY_1"]
    shape.CopyFrom(numpy_helper.from_array(np.array([-1, 2048], np.int64), shape.name))
    onnx.save(model, folder / "resnet50.onnx")
    onnx.save(overflowing_net(), folder / "overflow.onnx")
    rng = np.random.default_rng(0)
    for batch in request["batches"]:
        images = rng.random((batch, 3, 224, 224), dtype=np.float32)
        write_tensors(folder / f"{batch}.npz", {image.name: images})
    return {}


def prepare(root: Path, target: str) -> None:
    """Prepares both models by the command."""
    run_child(write_models, {"folder": str(root), "batches": list(BATCHES)})
    inputs = {
        "resnet50": '{"gpu_0/data_0": {shapes: [[1, 3, 224, 224], [8, 3, 224, 224]], range: [0, 1]}}',
        "overflow": "{x: {shapes: [[2, 32]]}}",
    }
    configs = root / "configs"
    configs.mkdir()
    for name in ("resnet50", "overflow"):
        text = _SPECS.format(name=name, target=target, inputs=inputs[name])
        (configs / f"{name}.yaml").write_text(text, encoding="utf-8")
    subprocess.run(prepare_command(configs, root / "artifacts"), check=True)


def plans_of(root: Path, target: str) -> dict[str, SessionPlan]:
    """Returns what is measured: both precisions as prepared, and on CUDA with each option turned."""
    bundle = root / "artifacts" / "resnet50"
    config = read_loader_config(bundle)
    plans = {}
    for label, name in (("fp32", target), ("fp16", f"{target}-fp16")):
        variant = find_variant(config, name)
        if variant is None:
            continue  # the default was shipped, or the precision stepped down: the manifest says which
        plans[label] = build_plan(bundle, variant)
        for option in OPTIONS if target == "cuda" else ():
            for value in ("0", "1"):
                plans[f"{label} {option}={value}"] = _with_option(plans[label], option, value)
    return plans


def _with_option(plan: SessionPlan, name: str, value: str) -> SessionPlan:
    first, *rest = plan.providers
    assert first.name == CUDA
    return plan._replace(providers=(first._replace(options={**first.options, name: value}), *rest))


def measure(root: Path, plans: Mapping[str, SessionPlan], batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields the medians of every plan and batch size, interleaved."""
    for batch in batches:
        results: dict[str, list[ProbeResult]] = {name: [] for name in plans}
        for _ in range(ROUNDS):
            for name, plan in plans.items():
                request = ProbeRequest(plan, str(root / f"{batch}.npz"), steady_s=0.5)
                results[name].append(measure_plan(request, timeout_s=TIMEOUT_S))
        for name, found in results.items():
            steady_ms = median(one.steady_ms for one in found)
            yield {
                "plan": name,
                "batch": batch,
                "init_ms": round(median(one.init_ms for one in found), 1),
                "first_ms": round(median(one.first_ms for one in found), 1),
                "steady_ms": round(steady_ms, 3),
                "images_per_s": round(batch / steady_ms * 1e3, 1),
                "gpu_mb": found[-1].gpu_mb,
            }


def describe_conversions(root: Path) -> Iterator[str]:
    """Yields a line per converted variant: its result, and how close its answers are."""
    for name in ("resnet50", "overflow"):
        manifest = read_manifest(root / "artifacts" / name)
        for record in manifest.variants:
            if record.conversion is not None and record.conversion.steps:
                step = record.conversion.steps[-1]
                snr = min((one.snr_db for one in record.accuracy), default=0.0)
                kept = f"{len(step.kept)} of {step.nodes} nodes in fp32 after {step.trials} trials"
                yield f"{name}/{record.name}: {step.precision}, {kept}, {snr:.1f} dB, level {record.level}"
        yield from (f"{name}: left out {one.variant}: {one.reason}" for one in manifest.left_out)


def main() -> int:
    """Runs the benchmark; the table comes last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--out", type=Path, help="Also write JSON here.")
    arguments = parser.parse_args()
    reason = unavailable_reason(arguments.target)
    if reason is not None:
        print(f"nothing was seen: {reason}")
        return 1
    with tempfile.TemporaryDirectory(prefix="gpu-conversions-") as name:
        root = Path(name)
        prepare(root, arguments.target)
        lines = list(describe_conversions(root))
        rows = list(measure(root, plans_of(root, arguments.target), arguments.batches))
    if arguments.out:
        document = {"machine": describe_machine(), "conversions": lines, "rows": rows}
        arguments.out.write_text(format_results(document), encoding="utf-8")
    print("\n".join(lines))
    for row in rows:
        print(" | ".join(str(value) for value in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
