"""Made-up bundles with every kind of record: seeded figures, no model, no process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.loader_config import (
    LOADER_SCHEMA_VERSION,
    FileEntry,
    Golden,
    LoaderConfig,
    Requirements,
    TensorSpec,
    Tolerance,
    Variant,
    VersionRange,
    write_loader_config,
)
from ortprep.bundle.manifest import (
    MANIFEST_SCHEMA_VERSION,
    Decision,
    LadderAttempt,
    LintFinding,
    Manifest,
    MeasurementRecord,
    OutputError,
    SourceRecord,
    TrialRecord,
    TuningRecord,
    VariantRecord,
    VerificationRecord,
    write_manifest,
)
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.report.content import ReportSubject
from ortprep.tables import Table

CPU = "CPUExecutionProvider"
PREPACKING = "session.disable_prepacking"
KNOBS = {
    "form": ("mapped", "inline", "prepacked", "ort"),
    "level": ("all", "extended"),
    "prepacking": ("on", "off"),
    "threads": ("all", "2", "1"),
    "memory_arena": ("on", "off"),
}
CHOSEN = 4
ENVIRONMENT = {
    "onnxruntime": "1.31.1",
    "onnxruntime_build": "ORT Build Info: git-branch=HEAD, build type=Release",
    "packages": {"onnx": "1.23.2", "numpy": "2.4.6", "onnxruntime-gpu": "1.31.1"},
    "python": "3.11.7",
    "system": "Linux 6.18",
    "hardware": {
        "machine": "x86_64",
        "cpu_model": "Example CPU @ 2.50GHz",
        "cpu_features": ["avx", "avx2", "avx512f", "fma"],
        "cores": 8,
        "memory_bytes": 64 * 2**30,
        "gpus": [],
    },
}


def around(median, *, spread=0.04, count=7):
    """Samples whose quartiles are `spread` away from their median, more or less."""
    shifts = [-2.0, -1.0, -1.0, 0.0, 1.0, 1.0, 3.0] if count == 7 else [0.0] * count
    return Samples.of(median * (1 + shift * spread) for shift in shifts)


def plan(name, *, init, first, steady=20.0, private=200.0):
    return PlanFigures(
        plan=name,
        ready_ms=around(140 + init + first),
        import_ms=around(95.0),
        init_ms=around(init),
        first_ms=around(first),
        steady_ms=around(steady),
        private_mb=around(private, spread=0.01),
        peak_mb=around(private * 1.6, spread=0.01),
    )


def measurement(*, cache="warm", sooner=6.0, skipped=None):
    slow = 1.0 if cache == "warm" else 2.2
    return MeasurementRecord(
        cache,
        7,
        "image=[1, 3, 224, 224]",
        (
            plan("default", init=240 * slow, first=30, private=310),
            plan("prepared", init=240 * slow / sooner * 0.7, first=30, private=60),
            plan("portable", init=240 * slow / sooner, first=34, steady=22, private=64),
        ),
        skipped or {},
    )


def error(output, ratio):
    return OutputError(
        output, "image=[1, 3, 224, 224]", ratio * 1e-3, ratio * 1e-2, (0, 17), 3.25, 3.2504, ratio
    )


def verification(outputs=("logits", "features")):
    errors = tuple(error(name, 0.02 * (index + 1)) for index, name in enumerate(outputs))
    floors = tuple(error(name, 0.015 * (index + 1)) for index, name in enumerate(outputs))
    return VerificationRecord(1e-3, 1e-5, 4, "seeded", errors, floors)


def options(choice):
    attributes: dict[str, int | bool | str] = {}
    if choice.get("threads", "all") != "all":
        attributes["intra_op_num_threads"] = int(choice["threads"])
    if choice.get("memory_arena") == "off":
        attributes["enable_cpu_mem_arena"] = False
    entries = {PREPACKING: "1"} if choice.get("prepacking") == "off" else {}
    return SessionOptionsRecord("ORT_DISABLE_ALL", attributes, entries)


def trial(number, choice, *, first, steady, kind="sampler"):
    figures = trial_figures(first, steady)
    made = None if "plan" in choice else options(choice)
    return TrialRecord(number, kind, choice, made, (ProviderRecord(CPU),), figures)


def trial_figures(first, steady):
    return PlanFigures(
        plan="trial",
        import_ms=around(1.0),
        ready_ms=around(first),
        init_ms=around(first * 0.6),
        first_ms=around(first * 0.4),
        steady_ms=around(steady),
        private_mb=around(80 + first / 4, spread=0.01),
        peak_mb=around(160.0, spread=0.01),
        cost_ratio=around((first + 99 * steady) / (270 + 99 * 20)),
    )


def tuning(*, trials=12, seed=0):
    """A search whose trial `CHOSEN` was chosen, and whose last two trials failed and exceeded a limit."""
    dice = random.Random(seed)
    base = {knob: values[0] for knob, values in KNOBS.items()}
    found = [
        trial(0, {"plan": "default"}, first=270, steady=20, kind="default"),
        trial(1, base | {"form": "inline"}, first=140, steady=20, kind="form"),
        trial(2, base, first=62, steady=20.2, kind="base"),
        trial(3, base | {"prepacking": "off"}, first=21, steady=31.5, kind="form"),
        trial(CHOSEN, base | {"form": "prepacked"}, first=33, steady=19.4, kind="form"),
    ]
    for number in range(len(found), trials - 2):
        choice = {knob: dice.choice(values) for knob, values in KNOBS.items()}
        found.append(trial(number, choice, first=dice.uniform(40, 150), steady=dice.uniform(20, 40)))
    failed = trial(len(found), base | {"form": "ort"}, first=1, steady=1)
    found.append(replace(failed, figures=None, failure="the child died of signal 11\nmore of it"))
    limited = trial(len(found), base | {"threads": "1"}, first=35, steady=70)
    found.append(replace(limited, violations=("private memory 410 MB, allowed 400",)))
    for number in (0, 3, CHOSEN):
        found[number] = replace(found[number], final=found[number].figures)
    return TuningRecord(
        runs_per_load=100,
        limits={"max_private_mb": 400.0},
        knobs=KNOBS,
        trials=tuple(found),
        chosen=CHOSEN,
        reason="cost 0.86×, ready 0.12×, steady run 0.97× of the default's at 100 runs per load",
        ended="no single change gains more than the noise",
        noise=0.031,
        elapsed_s=212.5,
        first_phase=3,
        overlap_mb=141.0,
    )


@dataclass(frozen=True)
class Story:
    """What is made up of a model.

    Attributes:
        name: Of the model.
        trials: Of its search; 0 for no search.
        sooner: How much smaller its init is.
        faster: Whether it is sooner beyond the noise.
        outputs: Names of outputs.
        created_at: When it was prepared.
        seed: Of its search.
        size_bytes: Of its weights.
    """

    name: str = "net"
    trials: int = 12
    sooner: float = 6.0
    faster: bool = True
    outputs: Sequence[str] = ("logits", "features")
    created_at: str = "2026-11-20T08:30:00+00:00"
    seed: int = 0
    size_bytes: int = 98 * 2**20


def manifest(story=None, **changes):
    """The manifest of a bundle with a variant for the CPU, tuned, and a portable one."""
    story = replace(story or Story(), **changes)  # type: ignore[arg-type]
    found = LintFinding("layout", "requirement", "node Conv_0", "is laid out for blocks of 16", "#1234")
    shipped = "prepared" if story.faster else "default"
    cpu = VariantRecord(
        name="cpu",
        target="cpu",
        level="extended",
        ladder=(
            LadderAttempt("all", "the lint found an error", (found,), 812.0, 400 * 2**20),
            LadderAttempt("extended", "taken", (), 640.0, 380 * 2**20),
        ),
        verification=verification(story.outputs),
        measurements=(
            measurement(sooner=story.sooner, skipped={"first phase": "the child died"}),
            measurement(cache="cold", sooner=story.sooner),
        ),
        decision=Decision(shipped, story.faster, "prepared is ready sooner than default"),
        tuning=tuning(trials=story.trials, seed=story.seed) if story.trials else None,
    )
    portable = VariantRecord(
        "portable", "cpu", "extended", (LadderAttempt("extended", "taken"),), verification(story.outputs)
    )
    return Manifest(
        schema_version=MANIFEST_SCHEMA_VERSION,
        name=story.name,
        created_at=story.created_at,
        pipeline_version="0.1.0",
        spec_digest=digest_bytes(story.name.encode()),
        source=SourceRecord(
            "path",
            "models/net.onnx",
            digest_bytes(b"source"),
            (),
            {"": 17},
            8,
            {"Conv": 53, "Relu": 49},
            story.size_bytes,
        ),
        environment=ENVIRONMENT,
        variants=(cpu, portable),
        files=(FileEntry("cpu/net_optimized.onnx.data", story.size_bytes, digest_bytes(b"weights")),),
        missing_targets={"cuda": "no CUDA device"},
    )


def loader(name="net"):
    """What jobs load of it; one option is from the spec, others from the search."""
    entry = FileEntry("cpu/net_optimized.onnx", 10, digest_bytes(b"graph"))
    chosen = SessionOptionsRecord(
        "ORT_DISABLE_ALL", {"log_severity_level": 3}, {"session.use_device_allocator_for_initializers": "1"}
    )
    variants = tuple(
        Variant(
            variant,
            "cpu",
            entry.path,
            (entry,),
            chosen,
            (ProviderRecord(CPU),),
            Requirements(VersionRange("1.23"), (CPU,)),
        )
        for variant in ("cpu", "portable")
    )
    return LoaderConfig(
        LOADER_SCHEMA_VERSION,
        name,
        (TensorSpec("image", "float32", (1, 3, 224, 224)),),
        (TensorSpec("logits", "float32", (1, 1000)),),
        Golden(FileEntry("golden.npz", 10, digest_bytes(b"golden")), Tolerance(1e-3, 1e-5)),
        variants,
    )


_TASKS = (("fetch", "never done"), ("package", "not recorded"))
HISTORY = Table("Tasks of the build", ("task", "because"), _TASKS)


def subject(story=None, **changes):
    made = manifest(story, **changes)
    return ReportSubject(made, loader(made.name), HISTORY)


def write_bundles(artifacts: Path, stories: Sequence[Story]) -> list[Path]:
    """Writes the records of bundles without their models; returns the manifests' paths."""
    for story in stories:
        (artifacts / story.name).mkdir(parents=True)
        write_loader_config(artifacts / story.name, loader(story.name))
        write_manifest(artifacts / story.name, manifest(story))
    return [artifacts / story.name / "manifest.json" for story in stories]
