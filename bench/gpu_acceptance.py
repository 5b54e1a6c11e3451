"""Checks everything that needs a GPU, in minutes: `python -m bench.gpu_acceptance [--out FILE.json]`.

Each check is a question with a measured answer; a failing check does not hide the others. Copy the results,
with date and versions, to docs/gpu.md. The last output is a short table. Without a GPU the script says so and
exits 1. `--dry-run` runs on the CPU what can be run there: a mistake here must not cost time on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from bench.gpu_models import CONV1D, DRY_RUN, GPU, Place, Prepared, prepare, write_conv1d
from bench.models import demo_specs, prepare_command, write_specs
from bench.pool import open_in_threads
from bench.result_file import describe_machine, format_results
from ortprep.bundle.codec import encode
from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.availability import unavailable_reason
from ortprep.children.child import run_child
from ortprep.children.probe import ProbeRequest, ProbeResult, measure_plan
from ortprep.errors import BundleError, LoadError, PipelineError
from ortprep.options import known_options
from ortprep.runtime import PoolConfig, SessionPool, open_bundle
from ortprep.runtime.loading.golden import read_golden
from ortprep.runtime.loading.session import CUDA

DOCTOR = ("env", "init")
ROUNDS = 3
PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        check: The question.
        verdict: `seen`, `FAILED` or `not seen`.
        answer: Figures, or why not.
        detail: Further data for the JSON file.
    """

    check: str
    verdict: str
    answer: str
    detail: Mapping[str, Any] = field(default_factory=dict)


def tune(root: Path, place: Place) -> list[Row]:
    """Searches the target's space on a convolution net, a transformer and a 1-D convolution net."""
    configs, artifacts = root / "configs-tune", root / "artifacts-tune"
    write_specs(demo_specs(place.models), configs, defaults=place.tune_defaults)
    run_child(write_conv1d, {"path": str(root / "conv1d.onnx")})
    (configs / "conv1d.yaml").write_text(CONV1D, encoding="utf-8")
    subprocess.run(prepare_command(configs, artifacts), check=False)
    return [
        _tuned_row(f"{name}: tune on {place.target}", artifacts / name, place.target)
        for name in (*place.models, "conv1d")
    ]


def _tuned_row(check: str, bundle: Path, target: str) -> Row:
    try:
        variants = read_manifest(bundle).variants
    except BundleError:
        return Row(check, "FAILED", "the build failed; see above")
    search = next((one.tuning for one in variants if one.name == target), None)
    if search is None:
        return Row(check, "FAILED", "no search")
    failed = {str(trial.choice): trial.failure for trial in search.trials if trial.failure}
    knobs = ", ".join(search.knobs)
    answer = f"{len(search.trials)} plans, {len(failed)} failed; {search.reason}; searched {knobs}"
    return Row(check, "seen", answer, {"failed": failed, "search": encode(search)})


def examine(root: Path, place: Place) -> list[Row]:
    """Runs each check of the doctor on the machine and one model."""
    folders = ["--artifacts", str(root / "artifacts")]
    return [_doctor_row(check, folders, place) for check in DOCTOR]


def _doctor_row(check: str, folders: list[str], place: Place) -> Row:
    title = f"doctor {check}"
    subject = ["--expect", place.target]
    if check == "init":
        subject = [place.models[0], "--devices", place.device]
    command = [
        sys.executable,
        "-m",
        "ortprep",
        "doctor",
        check,
        *subject,
        "--json",
    ]
    done = subprocess.run([*command, *folders], stdout=subprocess.PIPE, text=True, check=False)
    try:
        (found,) = json.loads(done.stdout)
    except ValueError:
        return Row(title, "FAILED", f"exit code {done.returncode} and no answer; see above")
    told = "; ".join(f"{one['code']}: {one['text']}" for one in found["findings"][:3])
    return Row(title, "FAILED" if done.returncode else "seen", told, found)


def check_prepared(model: Prepared) -> Row:
    """Was the variant prepared, at which step, how close are its answers, how much sooner is it?"""
    record = model.record()
    worst = max((error.ratio for error in record.verification.errors), default=0.0)
    noise = max((error.ratio for error in record.verification.noise_floor), default=0.0)
    reason = record.decision.reason if record.decision else "not measured"
    answer = f"step {record.level}, error {worst:.2g} of tolerance (noise {noise:.2g}); {reason}"
    detail = {"ladder": [attempt.outcome for attempt in record.ladder]}
    return Row(f"{model.name}: prepare {model.place.target}, verify", "seen", answer, detail)


def check_measured(model: Prepared) -> Row:
    """What do the plans cost: default, prepared, portable?"""
    record = model.record()
    figures = {
        f"{measurement.cache} {plan.plan}": _figures(plan)
        for measurement in record.measurements
        for plan in measurement.plans
    }
    answer = "; ".join(f"{name} {value}" for name, value in figures.items())
    has_gpu_memory = all(
        plan.gpu_mb is not None for m in record.measurements for plan in m.plans if plan.plan != "portable"
    )
    return Row(
        f"{model.name}: prepared against default, GPU memory",
        "seen" if has_gpu_memory or not model.place.is_gpu else "FAILED",
        answer,
    )


def _figures(plan: PlanFigures) -> str:
    gpu = "" if plan.gpu_mb is None else f" gpu {plan.gpu_mb.median:.0f} MB"
    times = (f"{plan.init_ms.median:.0f}", f"{plan.first_ms.median:.0f}", f"{plan.steady_ms.median:.2f}")
    return f"init/first/steady {'/'.join(times)} ms private {plan.private_mb.median:.0f} MB{gpu}"


def check_golden(request: Mapping[str, Any]) -> dict[str, Any]:
    """Loads a bundle, checks its golden sample, and names the variant; runs in a child."""
    opened = open_bundle(request["bundle"], target=request["target"], check="golden")
    return {"variant": opened.variant.name}


def check_provider(model: Prepared) -> Row:
    """Does `load` give the target, and the golden answers?"""
    reply = run_child(
        check_golden,
        {"bundle": str(model.bundle), "target": model.place.target},
    )
    verdict = "seen" if reply.value["variant"] == model.place.target else "FAILED"
    return Row(
        f"{model.name}: load(target={model.place.target!r}, check='golden')",
        verdict,
        f"took {reply.value['variant']}",
    )


def check_refusal(model: Prepared) -> Row:
    """Is a CUDA session without a GPU refused, rather than made on CPU?"""
    request = {"bundle": str(model.bundle), "target": "cuda"}
    try:
        with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
            run_child(check_golden, request)
    except LoadError as error:
        return Row("no visible GPU: cuda is refused", "seen", error.message.splitlines()[0])
    return Row("no visible GPU: cuda is refused", "FAILED", "a session was given")


def check_portable(model: Prepared) -> Row:
    """Does the portable variant answer on the CPU of this machine?"""
    request = {"bundle": str(model.bundle), "target": "portable"}
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        reply = run_child(check_golden, request)
    return Row(f"{model.name}: portable variant on CPU", "seen", f"took {reply.value['variant']}")


def check_pool(model: Prepared) -> Row:
    """Do two workers share a device, and is starting them at once sooner than in turn, or as threads?"""
    place = model.place
    feeds, _ = read_golden(read_loader_config(model.bundle).golden, model.bundle)
    seconds: dict[str, float] = {}

    def start(workers: int) -> float:
        started = time.perf_counter()
        with SessionPool(
            model.bundle, PoolConfig(devices=place.device, target=place.target, workers_per_device=workers)
        ) as pool:
            elapsed_s = time.perf_counter() - started
            with ThreadPoolExecutor(2 * workers) as threads:
                list(threads.map(pool.run, [feeds] * 20))
        return elapsed_s

    seconds["one"] = start(1)
    seconds["two at once"] = start(2)
    seconds["two in turn"] = start(1) + start(1)
    request = {"bundle": str(model.bundle), "count": 2, "together": True}
    seconds["two threads"] = run_child(open_in_threads, request).value["seconds"]
    answer = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    return Row(f"{model.name}: two workers on one device", "seen", answer, seconds)


def check_options(model: Prepared) -> Row:
    """Which options does this CUDA provider accept at their default, and is an unknown one refused?"""
    plan = model.plan()
    version = str(model.manifest.environment["onnxruntime"])
    refused = {}
    accepted = 0
    for option in known_options(CUDA, version):
        if option.owner is not None or not option.accepts(option.default):
            continue  # the pipeline's own, or with a default that no value says
        try:
            _probe(model, _with_option(plan, option.name, option.default), steady_s=0.01)
            accepted += 1
        except PipelineError as error:
            refused[option.name] = error.message
    try:
        _probe(model, _with_option(plan, "no_such_option", "1"), steady_s=0.01)
        unknown = "accepted"
    except PipelineError:
        unknown = "refused"
    verdict = "seen" if not refused and unknown == "refused" else "FAILED"
    answer = f"{accepted} accepted, {len(refused)} refused ({', '.join(refused)}), unknown {unknown}"
    return Row("CUDA options of the table", verdict, answer, {"refused": refused})


def check_reading_threads(model: Prepared) -> Row:
    """Does `external_data_loader_reading_threads` matter, cold?"""
    plan = model.plan()
    files = tuple(str(model.bundle / entry.path) for entry in model.variant().files)
    threads = ("0", "4", "8")
    init_ms: dict[str, list[float]] = {count: [] for count in threads}
    for _ in range(ROUNDS):
        for count in threads:
            tuned = _with_option(plan, "external_data_loader_reading_threads", count)
            init_ms[count].append(_probe(model, tuned, steady_s=0.01, drop_cache=files).init_ms)
    answer = ", ".join(f"{count}: init {median(values):.0f} ms" for count, values in init_ms.items())
    return Row(f"{model.name}: reading threads, cold", "seen", answer, {"init_ms": init_ms})


def _probe(
    model: Prepared, plan: SessionPlan, *, steady_s: float, drop_cache: tuple[str, ...] = ()
) -> ProbeResult:
    request = ProbeRequest(plan, str(model.sample), steady_s, drop_cache=drop_cache)
    return measure_plan(request, timeout_s=PROBE_TIMEOUT_S)


def _with_option(plan: SessionPlan, name: str, value: str) -> SessionPlan:
    first, *rest = plan.providers
    return plan._replace(providers=(first._replace(options={**first.options, name: value}), *rest))


def run_checks(models: tuple[Prepared, ...]) -> list[Row]:
    """Runs every check on every model it is for."""
    checks: list[tuple[Callable[[Prepared], Row], tuple[Prepared, ...]]] = [
        (check_prepared, models),
        (check_measured, models),
        (check_provider, models),
        (check_portable, models),
        (check_pool, models),
    ]
    if all(model.place.is_gpu for model in models):
        checks += [(check_refusal, models[:1]), (check_reading_threads, models), (check_options, models[:1])]
    return [_answer(check, model) for check, subjects in checks for model in subjects]


def _answer(check: Callable[[Prepared], Row], model: Prepared) -> Row:
    try:
        return check(model)
    except (PipelineError, StopIteration, KeyError) as error:
        return Row(f"{model.name}: {check.__name__}", "FAILED", f"{type(error).__name__}: {error}")


def main() -> int:
    """Runs the acceptance; the table comes last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Also write JSON here.")
    parser.add_argument("--dry-run", action="store_true", help="Try this script on the CPU.")
    arguments = parser.parse_args()
    machine = describe_machine()
    place = DRY_RUN if arguments.dry_run else GPU
    reason = unavailable_reason(place.target)
    if reason is not None:
        print(f"nothing was seen: {reason}")
        return 1
    with tempfile.TemporaryDirectory(prefix="gpu-acceptance-") as folder:
        root = Path(folder)
        models, elapsed_s = prepare(root, place)
        rows = [*run_checks(models), *examine(root, place), *tune(root, place)]
    missing = sorted({*place.models} - {model.name for model in models})
    rows += [
        Row(f"{name}: prepare {place.target}, verify", "FAILED", "the build failed; see above")
        for name in missing
    ]
    rows.append(Row("prepare, both models, all targets", "seen", f"{elapsed_s:.0f} s"))
    if arguments.out:
        document = {"machine": machine, "rows": [asdict(row) for row in rows]}
        arguments.out.write_text(format_results(document), encoding="utf-8")
    if arguments.dry_run:
        print("A dry run on the CPU: nothing was seen on a GPU.")
    for row in rows:
        print(f"{row.verdict:8} | {row.check:48} | {row.answer}")
    return 1 if any(row.verdict == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
