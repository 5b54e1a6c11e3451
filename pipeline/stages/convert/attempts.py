"""One precision of one variant: converted, run on its target, and judged by the gate."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.bundle.conversion_record import OutputAccuracy, PassRecord, PrecisionStep
from pipeline.bundle.session_record import SessionPlan
from pipeline.errors import (
    ChildError,
    ChildKilledError,
    ChildMemoryError,
    ChildTimeoutError,
    LoadError,
    PipelineError,
    ResourceError,
    StageError,
)
from pipeline.runtime.answers import write_answers
from pipeline.spec.conversion import Convert
from pipeline.stages.accuracy import judge_accuracy
from pipeline.stages.contract import Context
from pipeline.stages.convert.calls import call_of
from pipeline.stages.convert.precision_ladder import SEARCHED
from pipeline.stages.convert.running import PassOutcome, run_pass
from pipeline.stages.convert.search import search
from pipeline.stages.convert.trials_journal import Outcome, TrialsJournal, journalled
from pipeline.stages.optimize.session_plans import loading_options, loading_providers, without_optimizers
from pipeline.stages.sources import Graph
from pipeline.stages.verify.reference import Reference

TAKEN = "taken"

_LEVELS = {"all": "ORT_ENABLE_ALL", "extended": "ORT_ENABLE_EXTENDED", "basic": "ORT_ENABLE_BASIC"}
_REFUSALS = (LoadError, ChildError, StageError)
_NO_VERDICTS = (ChildKilledError, ChildMemoryError, ChildTimeoutError, ResourceError)
"""What says nothing of a precision: with more memory or time it may do."""

_KNOWN_TRIALS = 2
"""Sets that a search begins with whose outcome is known: no node kept, and all of them."""

_NO_MEMORY = re.compile("bad_alloc|bad allocation|Failed to allocate memory|out of memory", re.IGNORECASE)


@dataclass(frozen=True)
class Trial:
    """A conversion that was tried, and what the gate says of it.

    Attributes:
        failures: Why it will not do, a line each; none if the gate is passed.
        accuracy: Figures of every output.
        made_by: The pass that made it.
        kept: Nodes that stayed in fp32, by name.
        eligible: Nodes that were converted and need not be, in topological order.
        nodes: Nodes there are.
        too_large: Nodes that use weights beyond the largest half-precision number.
    """

    failures: tuple[str, ...]
    accuracy: tuple[OutputAccuracy, ...]
    made_by: PassRecord
    kept: tuple[str, ...]
    eligible: tuple[str, ...]
    nodes: int
    too_large: tuple[str, ...] = ()


class PrecisionAttempts:
    """Converts one variant's parent, again and again, into one folder."""

    def __init__(
        self,
        context: Context,
        convert: Convert,
        *,
        parent: Graph,
        reference: Reference,
        mode: str,
        calibration: Sequence[Path],
    ) -> None:
        """Takes what every attempt needs.

        Args:
            context: The task.
            convert: The spec's section.
            parent: What is converted.
            reference: Samples that it takes, and the unconverted source's answers.
            mode: How int8 is made.
            calibration: What ranges are calibrated with.
        """
        self._context, self._convert, self._parent = context, convert, parent
        self._reference, self._mode, self._calibration = reference, mode, calibration
        self._levels: tuple[str, ...] = tuple(_LEVELS.values())
        self.hint: str | None = None
        self._scratch = context.folder / ".attempt"
        self.written = self._scratch / "model" / f"{context.spec.name}.onnx"

    def try_step(self, precision: str) -> PrecisionStep:
        """Converts to a precision; what is accurate enough is at `written` then.

        Nodes are left out, as few as do, where the precision is one that is searched.

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
        if precision == "mixed" and trial.too_large and not self._convert.half.clip:
            always = frozenset(trial.too_large)
            trial = self._try(precision, always)
        if not trial.failures:
            # Mixed precision that has to keep nothing is fp16, of which there may be a variant already.
            is_half = precision == "mixed" and not always
            return _step_of("fp16" if is_half and not self._is_asked_alone(precision) else precision, trial)
        if precision not in SEARCHED or not self._convert.search.max_trials:
            return _step_of(precision, trial)
        return self._search(precision, trial, always)

    def _is_asked_alone(self, precision: str) -> bool:
        """Says whether the spec asks for mixed precision here, and not for fp16 beside it."""
        asked = self._convert.precisions(self._context.target)
        return self._context.variant_plan.precision == precision and "fp16" not in asked

    def _search(self, precision: str, first: Trial, always: frozenset[str]) -> PrecisionStep:
        say, limits = self._context.say, self._convert.search
        say(f"{precision}: {first.failures[0]}; searching for nodes to leave as they are")
        end = time.monotonic() + limits.budget_s
        latest: dict[frozenset[str], Trial] = {}

        every = frozenset(first.eligible)

        def attempt(kept: frozenset[str]) -> Outcome:
            latest.clear()
            if not kept:
                return Outcome(held=False, failures=first.failures)  # which is why there is a search
            if kept == every:
                return Outcome(held=True)  # with nothing converted it is its source
            trial = self._try_or_fail(precision, kept | always)
            if isinstance(trial, Outcome):
                return trial
            latest[kept] = trial
            return Outcome(held=not trial.failures, failures=trial.failures)

        self._context.kept.mkdir(parents=True, exist_ok=True)
        journal = TrialsJournal(self._context.kept / f"{precision}.jsonl")
        found = search(
            first.eligible,
            journalled(attempt, journal),
            max_trials=limits.max_trials + _KNOWN_TRIALS,
            deadline=lambda: time.monotonic() > end,
            say=say,
        )
        if found.kept is None or frozenset(found.kept) == every:
            return _step_of(precision, first, trials=found.trials)
        kept = frozenset(found.kept)
        trial = latest.get(kept) or self._try(precision, kept | always)
        return _step_of(precision, trial, trials=found.trials)

    def _try_or_fail(self, precision: str, kept: frozenset[str]) -> Trial | Outcome:
        """Tries a set; one that cannot be converted or run will not do, as one that answers wrongly."""
        try:
            return self._try(precision, kept)
        except _REFUSALS as error:
            _require_verdict(error)
            return Outcome(held=False, failures=(self._clean(error.message),))

    def _try_first(self, precision: str) -> Trial:
        """Tries a precision without a node kept, and settles on the level that all its trials are judged at.

        Where a session cannot be made, or crashes, levels are gone down as `optimize` does it: ONNX Runtime
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

    def _try(self, precision: str, kept: Sequence[str] | frozenset[str]) -> Trial:
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
        if not outcome.reply["eligible"]:
            raise StageError(
                f"nothing was converted to {precision}: {self._parent.path.name}\n"
                "  expected at least one node that can be and is not to be kept, got none"
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
        return _trial_of(outcome, judgement.failures, judgement.outputs)

    def _plan(self) -> SessionPlan:
        """Returns a session that optimises as `optimize` will: what is judged is nearly what jobs get."""
        spec = self._context.spec
        options = loading_options(spec.runtime, level=self._levels[0])
        options = without_optimizers(options, spec.optimize.disabled_optimizers)
        return SessionPlan(str(self.written), options, loading_providers(spec.runtime, self._context.target))

    def _clean(self, message: str) -> str:
        """Returns a message without folders and processes that are gone when it is read."""
        for folder in (self.written.parent, self._parent.folder):
            message = message.replace(f"{folder}/", "")
        return re.sub(r" \(pid \d+\)", "", message)


def _require_verdict(error: PipelineError) -> None:
    """Raises an error that says nothing of what was tried."""
    if isinstance(error, _NO_VERDICTS) or _NO_MEMORY.search(error.message):
        raise error


def _trial_of(outcome: PassOutcome, failures: tuple[str, ...], accuracy: tuple[OutputAccuracy, ...]) -> Trial:
    reply: Mapping[str, Any] = outcome.reply
    out_of_range = reply.get("out_of_range", ())
    return Trial(
        failures=failures,
        accuracy=accuracy,
        made_by=outcome.record,
        kept=tuple(reply["kept"]),
        eligible=tuple(reply["eligible"]),
        nodes=reply["nodes"] if "nodes" in reply else len(reply["quantized"]) + len(reply["kept"]),
        too_large=tuple(dict.fromkeys(node for tensor in out_of_range for node in tensor["nodes"])),
    )


def _step_of(precision: str, trial: Trial, *, trials: int = 0) -> PrecisionStep:
    return PrecisionStep(
        precision=precision,
        outcome="\n".join(trial.failures) or TAKEN,
        kept=trial.kept,
        nodes=trial.nodes,
        trials=trials,
        accuracy=trial.accuracy,
        passes=(trial.made_by,),
    )
