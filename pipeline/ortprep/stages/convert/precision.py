"""One precision of one variant: converted, run on its target, and judged by the gate."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ortprep.bundle.conversion_record import PrecisionStep, SampleSet
from ortprep.bundle.digest import DigestCache, digest_json
from ortprep.bundle.loader_config import SOURCE_PRECISION
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.answers import write_answers
from ortprep.children.probe import ProbeRequest, measure_plan
from ortprep.errors import (
    ChildError,
    ChildKilledError,
    ChildTimeoutError,
    LoadError,
    PipelineError,
    StageError,
)
from ortprep.measuring.staged_bundles import STAGED_VARIANT, StagedBundles
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.spec.conversion import ConvertSpec
from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.convert.passes import rank_nodes, run_pass
from ortprep.stages.convert.search import Kept, search
from ortprep.stages.core.accuracy import convert_section, judge_accuracy
from ortprep.stages.core.application_judge import ApplicationJudge
from ortprep.stages.core.contract import Context
from ortprep.stages.core.results import REFUSALS, TAKEN, Graph, read_fetched
from ortprep.stages.optimize.requirements import NO_INTEGERS, find_integer_type
from ortprep.stages.optimize.session_plans import LEVELS, loading_options, loading_providers
from ortprep.stages.verify.reference import (
    ReferenceAnswers,
    held_out,
    read_shared_reference,
)

_PRODUCTS = ("MatMul", "Gemm", "LSTM", "GRU", "com.microsoft.Attention")
_NARROWEST_FIRST = ("int4", "int8", "bf16", "fp16", SOURCE_PRECISION)
_NO_VERDICTS = (ChildKilledError, ChildTimeoutError)
"""Errors that say nothing about a precision: with more memory or time it may work."""

_TIMED_SHAPES, _TIMED_S = 3, 0.3
"""Shapes by which a candidate is timed before it is judged, and seconds of runs of each."""

_SLOWER = 1.25
"""Ratio of times from which a candidate is dropped unjudged; other work disturbs this timing."""

_NO_MEMORY = re.compile("bad_alloc|bad allocation|Failed to allocate memory|out of memory", re.IGNORECASE)


def plan_steps(requested: str, fallbacks: Sequence[str]) -> tuple[str, ...]:
    """Returns the precisions to try, in order: the requested one, then its fallbacks.

    Args:
        requested: A precision.
        fallbacks: Precisions that the spec falls back to: if it names the requested one, only what comes
            after it is tried; if not, only what is wider.
    """
    if requested in fallbacks:
        return (requested, *fallbacks[fallbacks.index(requested) + 1 :])
    rank = {precision: position for position, precision in enumerate(_NARROWEST_FIRST)}
    return (requested, *(step for step in fallbacks if rank[step] > rank[requested]))


def why_not_needed(step: str, requested: Sequence[str]) -> str | None:
    """Returns why a fallback step makes no variant; None if it makes one."""
    if step == SOURCE_PRECISION:
        return "it steps down to fp32, which the bundle already has"
    if step in requested:
        return f"it steps down to {step}, which the spec requests separately"
    return None


def choose_mode(convert: ConvertSpec, target: str, operators: Mapping[str, int]) -> str:
    """Returns how int8 is made if the spec leaves it open: `dynamic`, `static` or `weight_only`.

    ONNX Runtime 1.31's CUDA provider has no kernel for what dynamic quantisation writes, and none for
    calibrated integers that would be faster than floats; it has `MatMulNBits`. On the CPU a convolution whose
    activations are quantised as they come is slower than in fp32 (SqueezeNet: 65 ms against 19), with
    calibrated ranges it is faster (7 ms).
    """
    if convert.quantize.mode != "auto":
        return convert.quantize.mode
    if convert.is_auto:
        return "static"
    if target == "cuda":
        return "weight_only"
    products = sum(operators.get(name, 0) for name in _PRODUCTS)
    return "static" if operators.get("Conv", 0) > products else "dynamic"


Trial = tuple[PrecisionStep, PassReply]
"""A conversion that was tried: the gate's judgement, and which nodes were converted."""


class PrecisionAttempts:
    """Converts one variant's parent, again and again, into one folder.

    Attributes:
        written: The model, if the last step was accurate enough.
        hint: What the first step that failed advises, if anything.
    """

    def __init__(self, context: Context, scratch: Path, parent: Graph) -> None:
        """Reads what every attempt needs.

        Args:
            context: The variant's task.
            scratch: A folder for files, which the caller removes.
            parent: The model to convert.
        """
        self._context, self._convert, self._parent = context, convert_section(context.spec), parent
        self.hint: str | None = None
        self._levels: tuple[str, ...] = ()
        self._scratch = scratch
        self.written = scratch / "model" / f"{context.spec.name}.onnx"
        self._reference = read_shared_reference(context)
        self._mode = choose_mode(self._convert, context.target, parent.description.source.operators)
        self._calibration: Sequence[Path] = ()
        self._held_out = self._reference  # what judges static int8
        if any(map(self._is_static, plan_steps(context.variant_plan.precision, self._convert.steps_below))):
            # The spec's samples judge by their other half only.
            every, self._held_out = self._reference.samples, held_out(self._reference)
            calibrating = [sample.path for sample in every if sample not in self._held_out.samples]
            self._calibration = calibrating or [sample.path for sample in every]
        self._judge: ApplicationJudge | None = None
        self._is_faster = not self._convert.is_auto  # not to be asked then

    def _is_static(self, precision: str) -> bool:
        """Returns whether a precision has ranges of activations that samples calibrate."""
        return precision == "int8" and self._mode == "static"

    def _judging(self, precision: str) -> ReferenceAnswers:
        """Returns the samples and answers that judge a precision."""
        return self._held_out if self._is_static(precision) else self._reference

    def sample_sets(self, steps: Sequence[PrecisionStep]) -> tuple[SampleSet | None, SampleSet | None]:
        """Returns what calibrated the step that was taken, and the real samples that judged.

        Args:
            steps: Every step that was tried, the taken one last.
        """
        judged = next((step for step in reversed(steps) if step.made_by), steps[-1])
        samples = self._judging(judged.precision).samples
        real = [sample.path for sample in samples if sample.real is not None]
        calibration = self._calibration if steps[-1].made_by == "int8-static" else ()
        digest = DigestCache().digest
        calibrated_on, judged_on = (
            SampleSet(len(paths), digest_json([digest(path) for path in paths])) if paths else None
            for paths in (calibration, real)
        )
        return calibrated_on, judged_on

    def try_step(self, precision: str) -> PrecisionStep:
        """Converts to a precision, except for as few nodes as the gate needs in fp32.

        Raises:
            ChildError: The process was killed, or passed the deadline, which says nothing of the precision.
            SpecError: The spec names what the model does not have, or a sample cannot calibrate.
            OSError: The disk is full.
        """
        integers = find_integer_type(read_hardware(gpus=False))
        if precision == "int8" and self._convert.is_auto and integers is None:
            return PrecisionStep(precision, NO_INTEGERS)
        self._context.say(f"converting to {precision}")
        self._levels = tuple(LEVELS.values())[list(LEVELS).index(self._context.spec.optimize.level) :]
        try:
            step = self._convert_or_search(precision)
        except REFUSALS as error:
            _require_verdict(error)
            self.hint = self.hint or error.hint
            # Without temporary folders and process ids.
            message = error.message.replace(f"{self.written.parent}/", "")
            message = re.sub(r" \(pid \d+\)", "", message.replace(f"{self._parent.folder}/", ""))
            step = PrecisionStep(precision, message)
        if step.outcome != TAKEN:
            self._context.say(f"{precision} failed: {step.outcome.splitlines()[0]}")
        return step

    def _convert_or_search(self, precision: str) -> PrecisionStep:
        """Converts every node; if the gate does not hold then, searches for nodes to leave as they are."""
        step, reply = self._try_first(precision)
        if step.outcome != TAKEN and self._convert.search.max_trials:
            return self._search(step, reply.converted)
        return step

    def _search(self, first: PrecisionStep, nodes: Sequence[str]) -> PrecisionStep:
        """Leaves as few nodes unconverted as the gate needs.

        Args:
            first: What became of converting every node: it failed.
            nodes: Nodes that were converted.
        """
        say, limits, precision = self._context.say, self._convert.search, first.precision
        say(f"{precision}: {first.outcome.splitlines()[0]}; searching for nodes to leave unconverted")
        began_s, count = time.monotonic(), 0
        latest: dict[Kept, PrecisionStep] = {}  # the one whose files are at `written`

        def share_of_time() -> float:
            return (time.monotonic() - began_s) / limits.budget_s

        def holds(kept: Kept) -> bool:
            nonlocal count
            passes, count = False, count + 1
            latest.clear()
            try:
                latest[kept], _ = self._try(precision, kept)
                passes = latest[kept].outcome == TAKEN
            except REFUSALS as error:
                _require_verdict(error)
            self._context.progress(min(share_of_time(), 1.0))
            verdict = "passes" if passes else "does not pass"
            say(f"trial {count}: keeping {len(kept)} of {len(nodes)} nodes {verdict} the gate")
            return passes

        request = self._request(precision, Kept())
        ranked = self._is_static(precision) and rank_nodes(self._context, request, nodes)
        kept, trials = search(
            ranked or nodes,
            holds,
            max_trials=limits.max_trials,
            expired=lambda: share_of_time() > 1,
            is_ranked=bool(ranked),
        )
        if len(kept) == len(nodes):
            return dataclasses.replace(first, trials=trials)
        step = latest.get(kept) or self._try(precision, kept)[0]
        return dataclasses.replace(step, trials=trials)

    def _try_first(self, precision: str) -> Trial:
        """Tries a precision without a node kept, and settles the optimisation level of all its trials.

        If a session cannot be made, or crashes, it goes down one level as `optimize` does: ONNX Runtime
        1.31.1 dies on fp16 `Transpose` and `MatMul` with all optimisation on the CPU.
        """
        while True:
            try:
                return self._try(precision, Kept())
            except (LoadError, ChildError) as error:
                _require_verdict(error)
                if len(self._levels) == 1 or not self.written.exists():
                    raise
                self._levels = self._levels[1:]

    def _try(self, precision: str, kept: Kept) -> Trial:
        """Converts, runs every sample on the target, and asks the gate; raises what either raises."""
        spec, reference = self._context.spec, self._judging(precision)
        request = self._request(precision, kept)
        reply = run_pass(self._context, request)
        if not reply.converted:
            raise StageError(
                f"nothing was converted to {precision}: {self._parent.path.name}\n"
                "  expected at least one convertible node that is not kept, got none"
            )
        # The session optimises as `optimize` will, so that the gate judges nearly what jobs load.
        options = loading_options(spec.runtime, level=self._levels[0])
        providers = loading_providers(spec.runtime, self._context.target)
        plan = SessionPlan(str(self.written), options, providers)
        self._require_faster(plan)
        answers = write_answers(
            plan,
            [sample.path for sample in reference.samples],
            self._scratch / "answers",
            timeout_s=spec.optimize.timeout_s,
        )
        outputs, missed = judge_accuracy(spec, reference.samples, expected=reference.answers, got=answers)
        failures = missed or self._ask_application(plan)
        step = PrecisionStep(
            precision=precision,
            outcome="\n".join(failures) or TAKEN,
            kept=reply.kept,
            nodes=reply.nodes,
            accuracy=outputs,
            made_by=request.name,
        )
        return step, reply

    def _require_faster(self, plan: SessionPlan) -> None:
        """Compares runs of the first candidate of `precision: auto` with the parent's, in turns.

        This is only to drop what is slower before it is judged: what ships is decided by `measure`.

        Raises:
            StageError: It is clearly slower.
        """
        if self._is_faster:
            return
        parent = plan._replace(model=str(self._parent.path))
        by_shapes = {sample.shapes: sample.file for sample in reversed(self._reference.samples)}
        first, *more = list(by_shapes.values())[-_TIMED_SHAPES:]
        times_ms: tuple[list[float], list[float]] = ([], [])
        for which in (0, 1, 1, 0, 0, 1):
            request = ProbeRequest((parent, plan)[which], first, _TIMED_S, more_samples=tuple(more))
            found = measure_plan(request, timeout_s=self._context.spec.measure.timeout_s)
            times_ms[which].append(found.steady_ms + sum(found.more_steady_ms))
        before_ms, after_ms = map(min, times_ms)
        self._context.say(f"{before_ms:.3g} ms per run, {after_ms:.3g} ms converted")
        if after_ms > _SLOWER * before_ms:
            raise StageError(f"slower than fp32: {before_ms:.3g} ms per run, {after_ms:.3g} ms converted")
        self._is_faster = True

    def _ask_application(self, plan: SessionPlan) -> tuple[str, ...]:
        """Returns why the application's answers are not near enough with a candidate; nothing if they are."""
        spec, judge = self._context.spec, self._convert.judge
        if judge is None:
            return ()
        if self._judge is None:
            self._judge = ApplicationJudge(spec, judge, self._context.say)
        with TemporaryDirectory(prefix="judged-", dir=self._scratch) as folder:
            fetched = read_fetched(self._context).description
            staged = StagedBundles(Path(folder), fetched.interface.inputs, fetched.interface.outputs)
            bundle = staged.stage_judged(plan, fetched.source.files)
            verdict = self._judge.judge(bundle, STAGED_VARIANT)
        self._context.say(f"judge {verdict}")
        return () if verdict.holds else (str(verdict),)

    def _request(self, precision: str, kept: Kept) -> PassRequest:
        """Returns the request that makes a precision, with nodes kept besides those of the spec."""
        int8 = f"int8-{'weights' if self._mode == 'weight_only' else self._mode}"
        return PassRequest(
            source=self._parent.path,
            written=self.written,
            name={"int8": int8, "int4": "int4-weights"}.get(precision, precision),
            keep_nodes=tuple(sorted({*self._convert.keep_nodes, *kept})),
            quantize=self._convert.quantize,
            samples=tuple(self._calibration) if self._is_static(precision) else (),
        )


def _require_verdict(error: PipelineError) -> None:
    """Raises an error again if it says nothing about the precision."""
    if isinstance(error, _NO_VERDICTS) or _NO_MEMORY.search(error.message):
        raise error
