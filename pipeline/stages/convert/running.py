"""Running one pass in a process of its own, and what it left."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.bundle.conversion_record import PassRecord
from pipeline.bundle.verification import describe_files
from pipeline.runtime.child import run_child
from pipeline.stages.contract import Context
from pipeline.stages.convert.calls import PassCall
from pipeline.stages.convert.memory import require_memory
from pipeline.stages.fetch.inspection import inspect_file
from pipeline.stages.results import FetchResult
from pipeline.stages.sources import Graph


@dataclass(frozen=True)
class PassOutcome:
    """What a pass did.

    Attributes:
        record: For the manifest.
        reply: What its process answered, as JSON types.
    """

    record: PassRecord
    reply: Mapping[str, Any]


def run_pass(
    context: Context, call: PassCall, *, parent: Graph, written: Path, source: Path | None = None
) -> PassOutcome:
    """Runs a pass; nothing of what it wrote is left if it fails.

    Args:
        context: The task.
        call: The pass.
        parent: What the variant is made of.
        written: The model it writes, in a folder that is made anew for it.
        source: The model it reads, if that is what another pass made of the parent.

    Raises:
        StageError: The pass refuses the model.
        SpecError: The spec names what the model does not have.
        ResourceError: The pass needs more memory than there is.
        ChildError: Its process died, or passed the spec's deadline.
    """
    description = parent.description
    said = require_memory(
        call.name, description.source.initializer_bytes, external=description.interface.external
    )
    if said is not None:
        context.say(said)
    shutil.rmtree(written.parent, ignore_errors=True)
    written.parent.mkdir(parents=True)
    request = {**call.request, "source": str(source or parent.path), "written": str(written)}
    timeout_s = None if context.spec.convert is None else context.spec.convert.timeout_s
    try:
        reply = run_child(call.function, request, timeout_s=timeout_s)
    except BaseException:
        shutil.rmtree(written.parent, ignore_errors=True)
        raise
    record = PassRecord(call.name, round(reply.elapsed_s * 1e3, 3), reply.peak_rss_bytes)
    return PassOutcome(record, reply.value)


def describe_converted(model: Path, parent: Graph, *, digest: Any, name: str) -> FetchResult:
    """Returns what is in a converted model, as `fetch` describes a source.

    Args:
        model: The file, in a folder of its own.
        parent: What it was made of; what its inputs index is known from there, where fusing hides it.
        digest: Returns a file's digest.
        name: The model as the user knows it.

    Raises:
        SourceError: It is no model.
    """
    inspection = inspect_file(model, name=name)
    files = describe_files(model.parent, digest)
    own = next(entry for entry in files if entry.path == model.name)
    source = dataclasses.replace(
        parent.description.source,
        kind="convert",
        location=model.name,
        sha256=own.sha256,
        files=(own, *(entry for entry in files if entry is not own)),
        opsets=inspection.opsets,
        ir_version=inspection.ir_version,
        operators=inspection.operators,
        initializer_bytes=inspection.initializer_bytes,
    )
    bounds = parent.description.interface.index_bounds
    interface = dataclasses.replace(inspection.interface, index_bounds=bounds)
    return FetchResult(model.name, source, interface)
