"""Optimising a model as the task graph would, without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.bundle.codec import decode, encode
from pipeline.bundle.digest import digest_file
from pipeline.bundle.loader_config import FileEntry
from pipeline.bundle.manifest import SourceRecord
from pipeline.spec.models import ModelSpec
from pipeline.stages.contract import Context, Plan, TaskId, Upstream
from pipeline.stages.fetch.inspection import Inspection, inspect_model
from pipeline.stages.optimize.stage import Optimize
from pipeline.stages.results import FetchResult, OptimizeResult


class Build:
    """A fetched model, and what optimising it comes to."""

    def __init__(self, root: Path) -> None:
        self.source = root / "fetch"
        self.folder = root / "optimize"
        self.said: list[str] = []

    def optimize(self, variant: str = "cpu", **spec: Any) -> OptimizeResult:
        context = self.context(variant, spec)
        self.folder.mkdir()
        stage = Optimize()
        result = stage.run(context)
        stage.ensures(context, result)
        return decode(OptimizeResult, json.loads(json.dumps(result, allow_nan=False)))

    def context(self, variant: str, spec: Mapping[str, Any]) -> Context:
        model = ModelSpec.model_validate({"name": "net", "source": {"path": "model.onnx"}, **spec})
        return Context(
            plan=Plan(model.located_in(self.source), ("cpu",), {}),
            variant=variant,
            upstream={TaskId("fetch"): Upstream(self.source, encode(self.fetched()))},
            folder=self.folder,
            say=self.said.append,
            kept=self.folder / "kept",
        )

    def fetched(self) -> FetchResult:
        request = {"model": str(self.source / "model.onnx"), "name": "net"}
        found = decode(Inspection, inspect_model(request))
        record = SourceRecord(
            kind="path",
            location="model.onnx",
            sha256=digest_file(self.source / "model.onnx"),
            files=tuple(
                FileEntry(path.relative_to(self.source).as_posix(), path.stat().st_size, digest_file(path))
                for path in sorted(self.source.rglob("*"))
                if path.is_file()
            ),
            opsets=found.opsets,
            ir_version=found.ir_version,
            operators=found.operators,
            initializer_bytes=found.initializer_bytes,
        )
        return FetchResult("model.onnx", record, found.interface)

    def files(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
