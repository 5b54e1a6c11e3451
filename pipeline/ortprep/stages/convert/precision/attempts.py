"""One precision of one variant: converted, run on its target, and judged by the gate."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.codec import decode
from ortprep.bundle.conversion_record import OutputAccuracy, PassRecord, PrecisionStep
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.answers import write_answers
from ortprep.errors import (
    ChildError,
    ChildKilledError,
    ChildMemoryError,
    ChildTimeoutError,
    LoadError,
    PipelineError,
    ResourceError,
    StageError,
)
from ortprep.spec.conversion import ConvertSpec
from ortprep.stages.convert.pass_calls import call_of
from ortprep.stages.convert.pass_requests import PrecisionReply
from ortprep.stages.convert.pass_runner import run_pass
from ortprep.stages.convert.precision.journal import TrialsJournal
from ortprep.stages.convert.precision.ladder import SEARCHED
from ortprep.stages.convert.precision.search import search
from ortprep.stages.core.accuracy import judge_accuracy
from ortprep.stages.core.contract import Context
from ortprep.stages.core.sources import Graph
from ortprep.stages.optimize.session_plans import loading_options, loading_providers, without_optimizers
from ortprep.stages.verify.reference import ReferenceAnswers

TAKEN = "taken"

_LEVELS = {"all": "ORT_ENABLE_ALL", "extended": "ORT_ENABLE_EXTENDED", "basic": "ORT_ENABLE_BASIC"}
_REFUSALS = (LoadError, ChildError, StageError)
_NO_VERDICTS = (ChildKilledError, ChildMemoryError, ChildTimeoutError, ResourceError)
"""Errors that say nothing about a precision: with more memory or time it may work."""

_KNOWN_TRIALS = 2
"""Sets at the start of a search whose outcome is known: no node kept, and every node kept."""

_NO_MEMORY = re.compile("bad_alloc|bad allocation|Failed to allocate memory|out of memory", re.IGNORECASE)


@dataclass(frozen=True)
class PrecisionTrial:
    """A conversion that was tried, and the gate's judgement.

    Attributes:
        failures: Why it will not do, a line each; none if the gate is passed.
        accuracy: Figures of every output.
        made_by: The pass that made it.
        reply: Its nodes: converted, kept in fp32, and using weights that are too large.
    """

    failures: tuple[str, ...]
    accuracy: tuple[OutputAccuracy, ...]
    made_by: PassRecord
    reply: PrecisionReply


class PrecisionAttempts:
    """Converts one variant's parent, again and again, into one folder."""

    def __init__(
        self,
        context: Context,
        convert: ConvertSpec,
        *,
        parent: Graph,
        reference: ReferenceAnswers,
        mode: str,
        calibration: Sequence[Path],
    ) -> None:
        """Takes what every attempt needs."""
        self._context, self._convert, self._parent = context, convert, parent
        self._reference, self._mode, self._calibration = reference, mode, calibration
        self._levels: tuple[str, ...] = tuple(_LEVELS.values())
        self.hint: str | None = None
        self._scratch = context.folder / ".attempt"
        self.written = self._scratch / "model" / f"{context.spec.name}.onnx"

    def try_step(self, precision: str) -> PrecisionStep:
        """Converts to a precision; if it is accurate enough, the model is at `written`.

        A precision in `SEARCHED` may leave nodes in fp32, as few as possible.

        Raises:
            ChildError: The process was killed, or passed the deadline, which says nothing of the precision.
            ResourceError: There is not enough memory.
            SpecError: The spec names what the model does not have.
            OSError: The disk is full.
        """
        self._context.say(f"converting to {precision}")
        start = list(_LEVELS).index(self._context.spec.optimize.level)
        self._levels = tuple(_LEVELS.values())[start:]
        try:
            return self._try_step(precision)
        except _REFUSALS as error:
            _require_verdict(error)
            self.hint = self.hint or error.hint
            return PrecisionStep(precision, self._clean(error.message))

    def close(self) -> None:
        """Removes what the attempts left."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _try_step(self, precision: str) -> PrecisionStep:
        trial, always = self._try_first(precision), frozenset[str]()
        if precision == "mixed" and trial.reply.too_large and not self._convert.half.clip:
            always = frozenset(trial.reply.too_large)
            trial = self._try(precision, always)
        if not trial.failures:
            # Mixed precision that keeps no node is fp16, which may be a variant already.
            is_half = precision == "mixed" and not always
            return _step_of(
                "fp16" if is_half and not self._is_requested_alone(precision) else precision, trial
            )
        if precision not in SEARCHED or not self._convert.search.max_trials:
            return _step_of(precision, trial)
        return self._search(precision, trial, always)

    def _is_requested_alone(self, precision: str) -> bool:
        """Returns whether the spec asks for mixed precision here, and not for fp16 too."""
        requested = self._convert.precisions(self._context.target)
        return self._context.variant_plan.precision == precision and "fp16" not in requested

    def _search(self, precision: str, first: PrecisionTrial, always: frozenset[str]) -> PrecisionStep:
        say, limits = self._context.say, self._convert.search
        say(f"{precision}: {first.failures[0]}; searching for nodes to leave unconverted")
        began_s = time.monotonic()
        end = began_s + limits.budget_s
        latest: dict[frozenset[str], PrecisionTrial] = {}

        every = frozenset(first.reply.converted)

        def attempt(kept: frozenset[str]) -> bool:
            latest.clear()
            if not kept:
                return False  # the reason for the search
            if kept == every:
                return True  # without a converted node it is the source
            try:
                trial = self._try(precision, kept | always)
            except _REFUSALS as error:
                _require_verdict(error)
                return False
            latest[kept] = trial
            self._context.progress(min((time.monotonic() - began_s) / limits.budget_s, 1.0))
            return not trial.failures

        self._context.kept.mkdir(parents=True, exist_ok=True)
        journal = TrialsJournal(self._context.kept / f"{precision}.jsonl")
        result = search(
            first.reply.converted,
            lambda kept: journal.holds(kept, attempt),
            max_trials=limits.max_trials + _KNOWN_TRIALS,
            deadline=lambda: time.monotonic() > end,
            say=say,
        )
        if result.kept is None or frozenset(result.kept) == every:
            return _step_of(precision, first, trials=result.trials)
        kept = frozenset(result.kept)
        trial = latest.get(kept) or self._try(precision, kept | always)
        return _step_of(precision, trial, trials=result.trials)

    def _try_first(self, precision: str) -> PrecisionTrial:
        """Tries a precision without a node kept, and settles the optimisation level of all its trials.

        If a session cannot be made, or crashes, it goes down one level as `optimize` does: ONNX Runtime
        1.31.1 dies on fp16 `Transpose` and `MatMul` with all optimisation on the CPU.
        """
        while True:
            try:
                return self._try(precision, ())
            except (LoadError, ChildError) as error:
                _require_verdict(error)
                if len(self._levels) == 1 or not self.written.exists():
                    raise
                self._levels = self._levels[1:]

    def _try(self, precision: str, kept: Sequence[str] | frozenset[str]) -> PrecisionTrial:
        call = call_of(
            self._convert,
            precision,
            mode=self._mode,
            kept=sorted(kept),
            # Nodes whose weights do not fit are kept in mixed precision, once they are known.
            clip=precision == "mixed",
            samples=self._calibration,
        )
        outcome = run_pass(self._context, call, parent=self._parent, written=self.written)
        reply = decode(PrecisionReply, outcome.reply)
        if not reply.converted:
            raise StageError(
                f"nothing was converted to {precision}: {self._parent.path.name}\n"
                "  expected at least one convertible node that is not kept, got none"
            )
        answers = write_answers(
            self._plan(),
            [sample.path for sample in self._reference.samples],
            self._scratch / "answers",
            timeout_s=self._context.spec.optimize.timeout_s,
        )
        judgement = judge_accuracy(
            self._context.spec, self._reference.samples, expected=self._reference.answers, got=answers
        )
        return PrecisionTrial(judgement.failures, judgement.outputs, outcome.record, reply)

    def _plan(self) -> SessionPlan:
        """Returns a session that optimises as `optimize` will, so the gate judges nearly what jobs load."""
        spec = self._context.spec
        options = loading_options(spec.runtime, level=self._levels[0])
        options = without_optimizers(options, spec.optimize.disabled_optimizers)
        return SessionPlan(str(self.written), options, loading_providers(spec.runtime, self._context.target))

    def _clean(self, message: str) -> str:
        """Removes temporary folders and process ids from a message."""
        for folder in (self.written.parent, self._parent.folder):
            message = message.replace(f"{folder}/", "")
        return re.sub(r" \(pid \d+\)", "", message)


def _require_verdict(error: PipelineError) -> None:
    """Raises an error again if it says nothing about the precision."""
    if isinstance(error, _NO_VERDICTS) or _NO_MEMORY.search(error.message):
        raise error


def _step_of(precision: str, trial: PrecisionTrial, *, trials: int = 0) -> PrecisionStep:
    return PrecisionStep(
        precision=precision,
        outcome="\n".join(trial.failures) or TAKEN,
        kept=trial.reply.kept,
        nodes=trial.reply.nodes,
        trials=trials,
        accuracy=trial.accuracy,
        passes=(trial.made_by,),
    )
