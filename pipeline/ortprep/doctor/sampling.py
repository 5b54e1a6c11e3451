"""A made-up input for a model file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ortprep.bundle.loader_config import TensorSpec, read_loader_config
from ortprep.bundle.model_facts import dimension_name
from ortprep.children.answers import describe_tensors
from ortprep.children.child import run_child
from ortprep.doctor.doctor_model import CHILD_TIMEOUT_S, DoctorModel
from ortprep.errors import LoadError, SpecError
from ortprep.measuring.feeds import draw_feed, generator
from ortprep.quoting import quoted
from ortprep.runtime.loading.golden import read_golden
from ortprep.runtime.loading.session import build_session, default_plan
from ortprep.runtime.machine.memory import available_bytes
from ortprep.runtime.tensors.arrays import write_tensors

_SEED = 0
_UNKNOWN = 1
_MAX_ELEMENTS = 2**30
_SIZES = re.compile(r"(\d{1,9}(,\d{1,9}){0,31})?")

Shapes = Mapping[str, tuple[int, ...]]


def examine_source(source: Path, folder: Path, *, shapes: Shapes | None = None) -> DoctorModel:
    """Returns a model file as a subject, with an input made for it.

    Args:
        source: The ONNX file.
        folder: Folder for the input.
        shapes: Shapes by input, for those that the model leaves open; sizes still open are 1.

    Raises:
        LoadError: It is no model, or an input cannot be made up.
        SpecError: A shape does not fit it, or an input holds strings.
        OSError: The input cannot be written.
    """
    path, sample = source.absolute(), folder / "sample.npz"
    request = path, sample, dict(shapes or {})
    memory_bytes = available_bytes()
    remarks = run_child(write_sample, request, timeout_s=CHILD_TIMEOUT_S, memory_bytes=memory_bytes).value
    return DoctorModel(source.stem, str(sample), str(path), remarks=remarks)


def examine_bundle(bundle: Path, folder: Path) -> DoctorModel:
    """Returns a bundle as a subject, with its golden sample as input.

    Raises:
        BundleError: It cannot be read.
        OSError: The input cannot be written.
    """
    root, sample = bundle.absolute(), folder / "sample.npz"
    config = read_loader_config(root)
    write_tensors(sample, read_golden(config.golden, root)[0])
    return DoctorModel(config.name, str(sample), None, str(root))


def parse_shapes(texts: Sequence[str]) -> Shapes:
    """Returns shapes by input, from `NAME=1,3,224,224`.

    Raises:
        SpecError: One is not written so.
    """
    shapes = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        if not name or not _SIZES.fullmatch(sizes):
            raise SpecError(f"bad shape: {text!r}\n  expected NAME=1,3,224,224, got another text")
        shapes[name] = tuple(int(size) for size in sizes.split(",") if size)
    return shapes


def write_sample(request: tuple[Path, Path, Shapes]) -> tuple[str, ...]:
    """Writes an input for a model file, of shapes by input; returns what was assumed; runs in a child.

    Raises:
        LoadError: It is no model, or an input cannot be made up.
        SpecError: A shape does not fit it, or an input holds strings.
    """
    model, sample, chosen = request
    inputs = _inputs_of(model, chosen)
    shapes, remarks = settle_shapes(inputs, chosen)
    feeds = {
        tensor.name: draw_feed(tensor, shapes[tensor.name], generator(_SEED, tensor.name))
        for tensor in inputs
    }
    write_tensors(sample, feeds)
    return remarks


def _inputs_of(source: Path, chosen: Shapes) -> tuple[TensorSpec, ...]:
    """Returns a model's inputs as ONNX Runtime has them; raises `LoadError` unless all are tensors."""
    session = build_session(default_plan(str(source), level="ORT_DISABLE_ALL"))
    inputs = []
    for tensor in describe_tensors(session.get_inputs()):
        if "(" in tensor.dtype:
            raise LoadError(
                f"cannot make up input {tensor.name!r} of {source}\n  expected a tensor, got {tensor.dtype}"
            )
        axes = (dimension_name(axis) if isinstance(axis, str) else axis for axis in tensor.shape or ())
        # Of an unknown rank ONNX Runtime says what it says of a scalar.
        shape = tuple(axes) if tensor.shape or tensor.name not in chosen else None
        inputs.append(tensor._replace(shape=shape))
    return tuple(inputs)


def settle_shapes(inputs: Sequence[TensorSpec], chosen: Shapes) -> tuple[Shapes, tuple[str, ...]]:
    """Returns a shape for every input, and what was assumed to get there. Pure.

    Raises:
        SpecError: One is for no input, contradicts the model, or all ask for more than 2**30 elements.
    """
    names = [tensor.name for tensor in inputs]
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise SpecError(f"no such input: {unknown[0]!r}\n  expected one of {', '.join(names)}")
    sizes: dict[str, int] = {}
    for tensor in inputs:
        sizes |= _sizes_of(tensor, chosen.get(tensor.name))
    shapes = {tensor.name: chosen.get(tensor.name, _settled(tensor, sizes)) for tensor in inputs}
    count = sum(map(math.prod, shapes.values()))
    if count > _MAX_ELEMENTS:
        raise SpecError(f"inputs too large: {', '.join(names)}\n  expected up to 2**30 elements, got {count}")
    assumed = [tensor.name for tensor in inputs if tensor.name not in chosen and _is_open(tensor, sizes)]
    return shapes, tuple(_remark(name, shapes[name]) for name in assumed)


def _remark(name: str, shape: tuple[int, ...]) -> str:
    written = quoted(f"{name}={','.join(map(str, shape))}")
    return f"{name}: shape {list(shape)} is assumed; --shape {written} sets another"


def _settled(tensor: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    axes = tensor.shape or ()
    return tuple(axis if isinstance(axis, int) else sizes.get(axis or "", _UNKNOWN) for axis in axes)


def _is_open(tensor: TensorSpec, sizes: Mapping[str, int]) -> bool:
    return tensor.shape is None or any(
        not isinstance(axis, int) and axis not in sizes for axis in tensor.shape
    )


def _sizes_of(declared: TensorSpec, shape: tuple[int, ...] | None) -> dict[str, int]:
    """Returns what a shape says of an input's symbolic sizes."""
    axes = declared.shape
    if shape is None or axes is None:
        return {}
    if not declared.fits(shape):
        raise SpecError(f"bad shape for input {declared.name!r}\n  expected {list(axes)}, got {list(shape)}")
    return {axis: size for axis, size in zip(axes, shape, strict=True) if isinstance(axis, str)}
