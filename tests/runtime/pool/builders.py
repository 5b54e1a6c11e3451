"""Bundles of small models whose answers are known without running them."""

import numpy as np

from ortprep.bundle.loader_config import (
    Golden,
    LoaderConfig,
    TensorSpec,
    Tolerance,
    Variant,
    write_loader_config,
)
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import CPU_ONLY, entry, operator_model, write_record

CODES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "string": 8,
    "bool": 9,
    "float16": 10, "float64": 11, "uint32": 12, "uint64": 13, "bfloat16": 16,
}  # fmt: skip


def write_model_bundle(folder, operators, inputs, outputs, golden):
    """Writes a bundle of a model of operators, whose inputs and outputs are (type, shape) by name."""
    (folder / "cpu").mkdir(parents=True)
    path = "cpu/model_optimized.onnx"
    both = {**inputs, **outputs}
    model = operator_model(
        operators,
        {name: shape for name, (_, shape) in inputs.items()},
        {name: shape for name, (_, shape) in outputs.items()},
        {name: CODES[kind] for name, (kind, _) in both.items()},
    )
    (folder / path).write_bytes(model)
    write_tensors(folder / "golden.npz", golden)
    variant = Variant(
        name="cpu",
        target="cpu",
        model=path,
        files=(entry(folder, path),),
        session_options=SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": 1}),
        providers=(ProviderRecord("CPUExecutionProvider"),),
        requirements=CPU_ONLY,
    )
    config = LoaderConfig(
        schema_version="1.1",
        name=folder.name,
        inputs=tuple(TensorSpec(name, kind, tuple(shape)) for name, (kind, shape) in inputs.items()),
        outputs=tuple(TensorSpec(name, kind, tuple(shape)) for name, (kind, shape) in outputs.items()),
        golden=Golden(entry(folder, "golden.npz"), Tolerance(1e-5, 1e-6)),
        variants=(variant,),
    )
    write_loader_config(folder, config)
    write_record(folder)
    return folder


def write_doubling(folder, *, shape=("a", "b")):
    """Writes `y = x + x`."""
    x = np.ones([size if isinstance(size, int) else 2 for size in shape], np.float32)
    return write_model_bundle(
        folder,
        {"y": ("Add", ("x", "x"))},
        {"x": ("float32", shape)},
        {"y": ("float32", shape)},
        {"input:x": x, "output:y": x + x},
    )


def write_passing_on(folder, dtype, sample):
    """Writes `y = Identity(x)`."""
    return write_model_bundle(
        folder,
        {"y": ("Identity", ("x",))},
        {"x": (dtype, ("a", "b"))},
        {"y": (dtype, ("a", "b"))},
        {"input:x": sample, "output:y": sample},
    )
