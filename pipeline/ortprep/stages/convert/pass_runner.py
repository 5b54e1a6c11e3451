"""Runs one pass in its own process, checks memory before, and describes the result."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.conversion_record import PassRecord
from ortprep.bundle.verification import describe_files
from ortprep.children.child import run_child
from ortprep.errors import ResourceError
from ortprep.runtime.machine.process_memory import available_bytes
from ortprep.stages.convert.pass_calls import PassCall
from ortprep.stages.core.contract import Context
from ortprep.stages.core.results import FetchResult
from ortprep.stages.core.sources import Graph
from ortprep.stages.fetch.inspection import inspect_file

FACTORS = {
    "fusion": (1.4, 2.2),
    "fusion (onnxruntime-tools)": (1.4, 2.2),
    "int8-dynamic": (3.1, 3.1),
    "int8-static": (3.1, 3.1),
}
"""Largest resident set of each pass whose library holds the whole model, in sizes of its weights: where they
are in external data, and where they are in the model file.

Measured as docs/performance.md says; passes that are not named stream weights, tensor by tensor.
"""

_OVERHEAD_BYTES = 300 * 2**20
_WORTH_SAYING_BYTES = 2**30


@dataclass(frozen=True)
class PassResult:
    """What a pass did.

    Attributes:
        record: For the manifest.
        reply: What its process answered, as JSON types.
    """

    record: PassRecord
    reply: Mapping[str, Any]


def run_pass(
    context: Context, call: PassCall, *, parent: Graph, written: Path, source: Path | None = None
) -> PassResult:
    """Runs a pass; removes what it wrote if it fails.

    Raises:
        StageError: The pass refuses the model.
        SpecError: The spec names what the model does not have.
        ResourceError: The pass needs more memory than there is.
        ChildError: Its process died, or passed the spec's deadline.
    """
    description = parent.description
    message = require_memory(
        call.name, description.source.initializer_bytes, external=description.interface.external
    )
    if message is not None:
        context.say(message)
    shutil.rmtree(written.parent, ignore_errors=True)
    written.parent.mkdir(parents=True)
    request = call.make_request(source=str(source or parent.path), written=str(written))
    timeout_s = None if context.spec.convert is None else context.spec.convert.timeout_s
    try:
        reply = run_child(call.function, encode(request), timeout_s=timeout_s)
    except BaseException:
        shutil.rmtree(written.parent, ignore_errors=True)
        raise
    record = PassRecord(call.name, round(reply.elapsed_s * 1e3, 3), reply.peak_rss_bytes)
    return PassResult(record, reply.value)


def needed_bytes(pass_name: str, weights_bytes: int, *, external: bool) -> int | None:
    """Returns the peak memory of a pass; None for a pass that streams its weights."""
    factors = FACTORS.get(pass_name)
    return None if factors is None else int(factors[not external] * weights_bytes) + _OVERHEAD_BYTES


def require_memory(pass_name: str, weights_bytes: int, *, external: bool) -> str | None:
    """Returns a line about the memory a pass needs, None if it is little.

    Raises:
        ResourceError: There is not as much.
    """
    needed = needed_bytes(pass_name, weights_bytes, external=external)
    if needed is None or needed < _WORTH_SAYING_BYTES:
        return None
    available = available_bytes()
    if needed > available:
        raise ResourceError(
            f"not enough memory for {pass_name}: its library loads the whole model\n"
            f"  expected {needed / 2**30:.1f} GiB, got {available / 2**30:.1f} GiB",
            hint="convert: {quantize: {mode: weight_only}} streams its weights, as fp16 and bf16 "
            "do; or use a machine with more memory",
        )
    return f"{pass_name} loads the whole model: about {needed / 2**30:.1f} of {available / 2**30:.1f} GiB"


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
    model_file = next(entry for entry in files if entry.path == model.name)
    source = dataclasses.replace(
        parent.description.source,
        kind="convert",
        location=model.name,
        sha256=model_file.sha256,
        files=(model_file, *(entry for entry in files if entry is not model_file)),
        opsets=inspection.opsets,
        ir_version=inspection.ir_version,
        operators=inspection.operators,
        initializer_bytes=inspection.initializer_bytes,
    )
    bounds = parent.description.interface.index_bounds
    interface = dataclasses.replace(inspection.interface, index_bounds=bounds)
    return FetchResult(model.name, source, interface)
