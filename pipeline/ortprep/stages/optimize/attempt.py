"""One step of the ladder: make the file, lint it, load and run it in a fresh process."""

from __future__ import annotations

import dataclasses
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.conversion_record import ConversionRecord, computes_with_integers
from ortprep.bundle.file_links import share_model
from ortprep.bundle.loader_config import Requirements
from ortprep.bundle.manifest import LadderAttempt, LintFinding
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.children.child import run_child
from ortprep.errors import ChildKilledError
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import PORTABLE, Context, VariantPlan
from ortprep.stages.core.ladder import REFUSALS, TAKEN
from ortprep.stages.core.results import FetchResult
from ortprep.stages.core.sources import read_source
from ortprep.stages.optimize.graph_writer import SaveRequest, SaveResult, save_optimized
from ortprep.stages.optimize.ladder import Step
from ortprep.stages.optimize.lint import LintContext, errors_of
from ortprep.stages.optimize.reload_check import run_reload
from ortprep.stages.optimize.requirements import derive_requirements, with_options
from ortprep.stages.optimize.session_plans import loading_providers, saving_plan, step_options

_ATTEMPT = ".attempt"


@dataclass(frozen=True)
class OptimizeJob:
    """What every step of one variant's ladder needs.

    Attributes:
        spec: The model's spec.
        variant: The variant that is made.
        role: `portable`, or the target that it runs on.
        fetched: What it is made of.
        source: Its file.
        folder: Where the step's files are put if it holds.
        conversion: How the source was converted before; None if it is the user's own model.
    """

    spec: ModelSpec
    variant: VariantPlan
    role: str
    fetched: FetchResult
    source: Path
    folder: Path
    conversion: ConversionRecord | None = None

    @property
    def model(self) -> str:
        """Name of the written model."""
        return f"{self.spec.name}_optimized.onnx"

    @property
    def data(self) -> str:
        """Name of its external data file."""
        return f"{self.model}.data"

    @property
    def attempt(self) -> Path:
        """Where files are until the step holds."""
        return self.folder / _ATTEMPT


def job_of(context: Context) -> OptimizeJob:
    """Returns what the steps of a task's variant need; files go to the task's folder.

    Raises:
        StageError: The task is for no variant.
    """
    variant = context.variant_plan
    graph = read_source(context)
    return OptimizeJob(
        spec=context.spec,
        variant=variant,
        role=PORTABLE if variant.name == PORTABLE else variant.target,
        fetched=graph.description,
        source=graph.path,
        folder=context.folder.resolve(),
        conversion=graph.conversion,
    )


def try_step(job: OptimizeJob, step: Step) -> tuple[LadderAttempt, SaveResult | None]:
    """Makes the file as the step says; puts it in place if it holds, and leaves nothing of it if not."""
    started = time.perf_counter()
    saved: SaveResult | None = None
    peak_rss_bytes = 0
    try:
        job.attempt.mkdir()
        model, runtime = job.attempt / job.model, job.spec.runtime
        if step.level is None:
            share_model(job.source, model)  # external data keeps the names that the model gives it
        writer = saving_plan(runtime, job.role, step, source=job.source, model=model)
        saved, peak_rss_bytes = save_and_describe(job, job.attempt, writer)
        # The source is the last step, so its findings do not matter.
        outcome = describe_findings(errors_of(saved.findings)) if step.level is not None else ""
        if not outcome:
            reader = SessionPlan(
                str(model), step_options(runtime, step), loading_providers(runtime, job.role)
            )
            run_reload(reader, job.spec, job.fetched.interface)
            for path in sorted(job.attempt.iterdir()):
                path.rename(job.folder / path.name)
            outcome = TAKEN
    except ChildKilledError:
        # Says nothing about the step: a lesser graph must not result from a moment without memory.
        raise
    except REFUSALS as error:
        outcome = error.message
    finally:
        shutil.rmtree(job.attempt, ignore_errors=True)
    attempt = LadderAttempt(
        step=step.name,
        outcome=outcome,
        findings=saved.findings if saved else (),
        elapsed_ms=round((time.perf_counter() - started) * 1e3, 3),
        peak_rss_bytes=peak_rss_bytes,
    )
    return attempt, saved if outcome == TAKEN else None


def save_and_describe(job: OptimizeJob, folder: Path, plan: SessionPlan | None) -> tuple[SaveResult, int]:
    """Has a child make the session that writes a file, and say what is in it.

    Returns:
        What is in the file, and the child's largest resident set in bytes.

    Raises:
        LoadError: ONNX Runtime refuses the model, or cannot write.
        ChildError: The child died.
    """
    interface = job.fetched.interface
    context = LintContext(
        variant=job.role,
        source_operators=tuple(job.fetched.source.operators),
        inputs=tuple(tensor.name for tensor in interface.inputs),
        outputs=tuple(tensor.name for tensor in interface.outputs),
    )
    request = SaveRequest(folder / job.model, job.data, context, plan)
    reply = run_child(save_optimized, request, timeout_s=job.spec.optimize.timeout_s)
    return reply.value, reply.peak_rss_bytes


def requirements_of(
    job: OptimizeJob, saved: SaveResult, options: SessionOptionsRecord, providers: tuple[ProviderRecord, ...]
) -> Requirements:
    """Returns what a machine needs for a written file that is loaded with those options."""
    on_gpu = job.role == "cuda"
    needs = derive_requirements(
        domains=saved.domains,
        portable=job.role == PORTABLE,
        opsets=saved.opsets,
        ir_version=saved.ir_version,
        integers=job.role != "cuda" and computes_with_integers(job.conversion),
        providers=tuple(provider.name for provider in providers),
        installed=saved.onnxruntime,
        hardware=read_hardware(gpus=on_gpu),
        device_id=int(providers[0].options.get("device_id", "0")) if on_gpu else None,
    )
    versions = with_options(needs.onnxruntime, options, providers, installed=saved.onnxruntime)
    return dataclasses.replace(needs, onnxruntime=versions)


def describe_findings(findings: tuple[LintFinding, ...]) -> str:
    """Returns the findings as lines of an error."""
    return "\n  ".join(f"{finding.rule} at {finding.subject!r}: {finding.detail}" for finding in findings)
