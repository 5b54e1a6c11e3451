"""Models as the stage prepares them."""

from __future__ import annotations

import json

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.manifest import SourceRecord
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import Context, Plan, TaskId, Upstream
from ortprep.stages.core.results import FetchResult, PreparedResult
from ortprep.stages.fetch.inspection import inspect_model
from ortprep.stages.optimize.stage import OptimizeStage


class Build:
    """A fetched model, and what optimising it comes to."""

    def __init__(self, root):
        self.source = root / "fetch"
        self.folder = root / "optimize"
        self.said = []

    def optimize(self, variant="cpu", **spec):
        context = self.context(variant, spec)
        self.folder.mkdir()
        stage = OptimizeStage()
        result = stage.run(context)
        return decode(PreparedResult, json.loads(json.dumps(result, allow_nan=False)))

    def context(self, variant, spec):
        model = ModelSpec.model_validate({"name": "net", "source": {"path": "model.onnx"}, **spec})
        return Context(
            plan=Plan(model.located_in(self.source), ("cpu",)),
            variant=variant,
            upstream={TaskId("fetch"): Upstream(self.source, encode(self.fetched()))},
            folder=self.folder,
            say=self.said.append,
        )

    def fetched(self):
        found = inspect_model((str(self.source / "model.onnx"), "net"))
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

    def files(self):
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
