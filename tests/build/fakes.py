"""Two small stages that implement the contract: `shout` upper-cases a word, `count` counts its letters."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortprep.build.execution import build_tasks
from ortprep.errors import StageError
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import Plan, TaskId


@dataclass
class Shout:
    word: str = "hello"
    fails: bool = False
    runs: list[str] = field(default_factory=list)
    name: str = "shout"
    version: int = 1

    def variants(self, plan):
        return (None,)

    def requires(self, plan, variant):
        return ()

    def key(self, plan, variant):
        return {"word": self.word}

    def run(self, context):
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

    def variants(self, plan):
        return plan.targets

    def requires(self, plan, variant):
        return (TaskId("shout"),)

    def key(self, plan, variant):
        return {"variant": variant}

    def run(self, context):
        upstream = context.upstream[TaskId("shout")]
        count = len((upstream.folder / "sub" / "word").read_text())
        self.runs.append(count)
        return {"count": count, "told": upstream.result["length"]}


def spec(name="m"):
    return ModelSpec.model_validate({"name": name, "source": {"path": "m.onnx"}})


def tasks(artifacts, shout, count, *, name="m"):
    plan = Plan(spec=spec(name), targets=("cpu",))
    return build_tasks(plan, (shout, count), artifacts)
