"""Two small stages that implement the contract: `shout` upper-cases a word, `count` counts its letters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortprep.build.execution import Task, build_tasks
from ortprep.errors import StageError
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import Context, Plan, TaskId


@dataclass
class Shout:
    word: str = "hello"
    fails: bool = False
    runs: list[str] = field(default_factory=list)
    name: str = "shout"
    version: int = 1

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        return (None,)

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        return ()

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        return {"word": self.word}

    def run(self, context: Context) -> Mapping[str, Any]:
        self.runs.append(self.word)
        (context.folder / "sub").mkdir()
        (context.folder / "sub" / "word").write_text(self.word.upper())
        context.say(f"shouting {self.word}")
        if self.fails:
            raise StageError("lost its voice", hint="drink tea")
        return {"length": len(self.word)}


@dataclass
class Count:
    runs: list[int] = field(default_factory=list)
    name: str = "count"
    version: int = 1

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        return plan.targets

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        return (TaskId("shout"),)

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        return {"variant": variant}

    def run(self, context: Context) -> Mapping[str, Any]:
        upstream = context.upstream[TaskId("shout")]
        count = len((upstream.folder / "sub" / "word").read_text())
        self.runs.append(count)
        return {"count": count, "told": upstream.result["length"]}


def spec(name: str = "m") -> ModelSpec:
    return ModelSpec.model_validate({"name": name, "source": {"path": "m.onnx"}})


def tasks(artifacts: Path, shout: Shout, count: Count, *, name: str = "m") -> tuple[Task, ...]:
    plan = Plan(spec=spec(name), targets=("cpu",))
    return build_tasks(plan, (shout, count), artifacts)
