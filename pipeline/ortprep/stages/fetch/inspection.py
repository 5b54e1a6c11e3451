"""A description of a model, read without its weights and without a session, and its external data.

`inspect_model` runs in a child process; `inspect_file` starts it. External data outside the model's folder is
refused, as ONNX Runtime itself refuses it at load, but here with the file's name and before anything is
copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ortprep.bundle.digest import DigestCache
from ortprep.bundle.loader_config import TensorSpec, find_unusable
from ortprep.bundle.model_facts import ModelFacts, ModelInterface, dimension_name
from ortprep.bundle.onnx_wire import WireError, external_locations, read_skeleton
from ortprep.children.child import run_child
from ortprep.errors import SourceError
from ortprep.runtime.machine.memory import available_bytes
from ortprep.transport.time_limit import check_time

if TYPE_CHECKING:
    import onnx

MAX_INLINE_BYTES = 2**31 - 1
"""Largest model file that protobuf reads; larger models keep their weights in external data."""

_MAX_BYTES = 2**40
"""Size of the largest file of external data, in bytes."""

TIMEOUT_S = 600.0
"""Timeout of reading a model without its weights, in seconds; a graph of 100,000 nodes takes about 10 s."""


def inspect_file(model: Path, *, name: str, timeout_s: float = TIMEOUT_S) -> ModelFacts:
    """Reads a model file in a child process; its external data need not be there.

    Raises:
        ChildTimeoutError: It takes longer.
        SourceError: It is not an ONNX model, or refers to data outside its folder.
    """
    request = str(model), name
    return run_child(inspect_model, request, timeout_s=timeout_s, memory_bytes=available_bytes()).value


def inspect_model(request: tuple[str, str]) -> ModelFacts:
    """Child function of `inspect_file`, which has its errors: the file, and what messages call it."""
    path, name = request
    check_model_size(Path(path), name)
    try:
        skeleton = read_skeleton(Path(path))
        facts = describe_model(parse_skeleton(skeleton))
        locations = external_locations(skeleton)
    except (WireError, ValueError) as error:
        raise SourceError(
            f"not an ONNX model, or an incomplete one: {name}\n  expected a complete ONNX file, got: {error}",
            hint="export or download the model again",
        ) from error
    unusable = find_unusable((*facts.interface.inputs, *facts.interface.outputs))
    if unusable:
        raise SourceError(
            f"inputs or outputs of a type that no array has: {name}\n"
            f"  expected bfloat16, or a type of numpy; got {unusable}",
            hint="cast them inside the model, whose weights may stay as they are",
        )
    # More than those of tensors that say so: no reader sees another one.
    external = {check_location(place, model=name): facts.external.get(place, 0) for place in locations}
    return replace(facts, external=external)


def check_model_size(path: Path, name: str) -> None:
    """Raises `SourceError` for a file that is larger than any model; before it is read or hashed."""
    size_bytes = path.stat().st_size
    if size_bytes > MAX_INLINE_BYTES:
        raise SourceError(
            f"model file too large: {name}\n  expected under 2 GiB, got {size_bytes} bytes",
            hint="save it with external data: onnx.save(model, path, save_as_external_data=True)",
        )


def parse_skeleton(skeleton: bytes) -> onnx.ModelProto:
    """Parses a model without the values of its large tensors; for child processes.

    Raises:
        ValueError: It is not an ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    from ortprep.stages.core.graph_walk import check_ranks

    try:
        model = onnx.ModelProto.FromString(skeleton)
    except DecodeError as error:
        raise ValueError("its bytes are not a ModelProto, or memory is short") from error
    if not model.HasField("graph") or not model.opset_import:
        raise ValueError("expected a graph and its opsets, found none")
    check_ranks(model)
    return model


def describe_model(model: onnx.ModelProto) -> ModelFacts:
    """Returns what a parsed skeleton says; for child processes.

    Raises:
        ValueError: It refers to external data in a way that cannot be.
    """
    from ortprep.stages.core.graph_walk import (
        external_extents,
        find_index_bounds,
        values_bytes,
        walk_initializers,
        walk_operators,
    )

    graph = model.graph
    external = external_extents(model)
    held = {item.name for item in graph.initializer} | {item.values.name for item in graph.sparse_initializer}
    interface = ModelInterface(
        inputs=tuple(_describe_value(item) for item in graph.input if item.name not in held),
        outputs=tuple(_describe_value(item) for item in graph.output),
        index_bounds=find_index_bounds(graph),
        external=bool(external),
    )
    return ModelFacts(
        interface=interface,
        opsets={_plain_domain(item.domain): item.version for item in model.opset_import},
        ir_version=model.ir_version,
        operators=dict(sorted(Counter(map(_operator, walk_operators(model))).items())),
        initializer_bytes=sum(values_bytes(tensor) for tensor in walk_initializers(model)),
        external=external,
    )


def _plain_domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _operator(node: onnx.NodeProto) -> str:
    domain = _plain_domain(node.domain)
    return f"{domain}.{node.op_type}" if domain else str(node.op_type)


def _describe_value(value: onnx.ValueInfoProto) -> TensorSpec:
    """Returns an input or output; one that is no tensor is `sequence(…)`, `map(…)` or `optional(…)`."""
    from ortprep.stages.core.graph_walk import element_type_name

    kind = value.type.WhichOneof("value") or "unknown"
    if kind != "tensor_type":
        return TensorSpec(value.name, f"{kind.removesuffix('_type')}(…)", None)
    tensor = value.type.tensor_type
    shape = tuple(map(_describe_axis, tensor.shape.dim)) if tensor.HasField("shape") else None
    return TensorSpec(value.name, element_type_name(tensor.elem_type), shape)


def _describe_axis(axis: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if axis.HasField("dim_value") and axis.dim_value >= 0:
        return int(axis.dim_value)
    return dimension_name(str(axis.dim_param))


# -- external data: a model names it by paths relative to its own folder


def check_location(location: str, *, model: str) -> str:
    """Returns an external data location, which has to be a plain relative path.

    Raises:
        SourceError: The path is absolute, climbs out, has characters that nobody can print, or is no path. A
            star begins what ONNX Runtime takes for an address in memory. Or it is one that no bundle may
            have, since it can be written shorter.
    """
    pure, hint = PurePosixPath(location), "save the model again with its external data beside it"
    is_odd = not location.isprintable() or any(character in location for character in "\\*")
    if is_odd or pure.is_absolute() or ".." in pure.parts or not pure.parts or len(location) > 1024:
        raise SourceError(
            f"external data outside the model's folder: {location[:200]!r} in {model}\n"
            "  expected a relative path below the folder",
            hint=hint,
        )
    if location != str(pure):
        raise SourceError(
            f"external data has a name that no bundle may have: {location!r} in {model}\n"
            f"  expected it without empty parts and '.', as {str(pure)!r}",
            hint=hint,
        )
    return location


def find_beside(model: Path, location: str) -> Path:
    """Returns the external data file of a local model.

    Raises:
        SourceError: There is no such file, or a link leads out of the model's folder.
    """
    folder = model.parent.resolve()
    path = (folder / location).resolve()
    if not path.is_relative_to(folder):
        raise SourceError(
            f"external data outside the model's folder: {location!r} in {model}\n"
            f"  expected below {folder}, got a link to {path}",
            hint="put the file itself into the folder, if you know that it belongs to the model",
        )
    if not path.is_file():
        raise SourceError(
            f"external data missing: {location!r} of {model}\n  expected a file, got none at {path}"
        )
    return path


def digest_beside(model: Path, cache: DigestCache) -> Mapping[str, str]:
    """Returns the digest of every external data file of a local model, by its plain relative path.

    What cannot be fetched has words in place of its digest; fetching it will say what is wrong. Raises what
    `check_time` raises.
    """
    digests = {}
    try:
        skeleton = read_skeleton(model, between_reads=check_time)
        locations = external_locations(skeleton, between_reads=check_time)
    except WireError:
        return {}
    for location in locations:
        path = str(PurePosixPath(location))
        try:
            file = find_beside(model, check_location(location, model=str(model)))
            digests[path] = "too large" if file.stat().st_size > _MAX_BYTES else cache.digest(file)
        except (SourceError, OSError):
            digests[path] = "unreadable"
    return digests
