"""Bundles of a tiny linear model, as the build writes them, and the models themselves.

The models are written field by field: the runtime's tests have no onnx package.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ortprep.bundle.digest import BLOCK_BYTES, digest_blocks, digest_file
from ortprep.bundle.loader_config import (
    FileEntry,
    FirstPhase,
    Golden,
    LoaderConfig,
    Requirements,
    TensorSpec,
    Tolerance,
    Variant,
    VersionRange,
    read_loader_config,
    write_loader_config,
)
from ortprep.bundle.manifest import Manifest, SourceRecord, write_manifest
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.runtime.tensors.arrays import write_tensors

ROWS, COLUMNS = 8, 4
ANY_VERSION = VersionRange("1.23")
CPU_ONLY = Requirements(ANY_VERSION, ("CPUExecutionProvider",))
CUDA_NEEDED = Requirements(ANY_VERSION, ("CUDAExecutionProvider", "CPUExecutionProvider"))
UNMET = Requirements(VersionRange("99.0"), ("CPUExecutionProvider",))


def weights_of(seed):
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def sample():
    return np.linspace(-1, 1, 2 * ROWS, dtype=np.float32).reshape(2, ROWS)


def assert_answers(session, seed=0):
    """Asserts that a session answers `sample()` as the model with weights of that seed does."""
    (answer,) = session.run(None, {"x": sample()})
    np.testing.assert_allclose(answer, sample() @ weights_of(seed), rtol=1e-4, atol=1e-5)


def write_bundle(folder, *, seed=0, requirements=None, options=None, first=None):
    """Writes a bundle with one variant per entry of `requirements`, in that order; returns its folder.

    A variant named `cuda…` is for CUDA, every other one for the CPU. With `first`, each has a first phase.
    """
    variants = tuple(
        _write_variant(folder, name, needs, options or SessionOptionsRecord("ORT_DISABLE_ALL"), seed)
        for name, needs in (requirements or {"cpu": CPU_ONLY}).items()
    )
    if first is not None:
        variants = tuple(
            variant._replace(first_phase=FirstPhase(first, variant.providers)) for variant in variants
        )
    golden = {"input:x": sample(), "output:y": sample() @ weights_of(seed)}
    write_tensors(folder / "golden.npz", golden)
    config = LoaderConfig(
        schema_version="1.0",
        name="linear",
        inputs=(TensorSpec("x", "float32", ("batch", ROWS)),),
        outputs=(TensorSpec("y", "float32", ("batch", COLUMNS)),),
        golden=Golden(entry(folder, "golden.npz"), Tolerance(1e-4, 1e-5)),
        variants=variants,
    )
    write_loader_config(folder, config)
    write_record(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class Part:
    """A variant that answers with weights of its own, so that answers tell which one it was."""

    name: str
    seed: int
    precision: str = "fp32"
    requirements: Requirements = CPU_ONLY


TWO_PRECISIONS = (Part("cpu", seed=0), Part("cpu-int8", seed=1, precision="int8"))


def write_converted(folder, parts=TWO_PRECISIONS):
    """Writes a bundle of two precisions, each variant with a golden sample of its own."""
    write_bundle(folder, requirements={part.name: part.requirements for part in parts})
    config = read_loader_config(folder)
    variants = tuple(
        _convert(folder, variant, part) for variant, part in zip(config.variants, parts, strict=True)
    )
    write_loader_config(folder, config._replace(variants=variants))
    write_record(folder)
    return folder


def _convert(folder, variant, part):
    weights, x = weights_of(part.seed), batch_of(2)
    paths = write_linear(folder / variant.model, weights)
    golden = f"{part.name}/golden.npz"
    write_tensors(folder / golden, {"input:x": x, "output:y": x @ weights})
    return variant._replace(
        files=tuple(entry(folder, f"{part.name}/{path.name}") for path in paths),
        precision=part.precision,
        golden=Golden(entry(folder, golden), Tolerance(1e-4, 1e-5)),
    )


def batch_of(size):
    return np.random.default_rng(size).standard_normal((size, ROWS)).astype(np.float32)


def _write_variant(folder, name, needs, options, seed):
    paths = write_linear(folder / name / "linear_optimized.onnx", weights_of(seed))
    providers = tuple(ProviderRecord(provider) for provider in needs.providers)
    return Variant(
        name=name,
        target="cuda" if name.startswith("cuda") else "cpu",
        model=f"{name}/linear_optimized.onnx",
        files=tuple(entry(folder, f"{name}/{path.name}") for path in paths),
        session_options=options,
        providers=providers,
        requirements=needs,
    )


def entry(folder, path):
    file = folder / path
    size_bytes = file.stat().st_size
    blocks = digest_blocks(file, threads=1) if size_bytes > BLOCK_BYTES else ""
    return FileEntry(path, size_bytes, digest_file(file), blocks)


def write_record(folder):
    """Writes a manifest that lists what is in the folder now."""
    files = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )
    source = SourceRecord("demo", "linear", "sha256:" + "0" * 64, (), {"": 17}, 8, {"MatMul": 1}, 128)
    manifest = Manifest(
        schema_version="1.0",
        name="linear",
        created_at="2026-01-01T00:00:00Z",
        pipeline_version="0.1.0",
        spec_digest="sha256:" + "0" * 64,
        source=source,
        environment={},
        variants=(),
        files=tuple(entry(folder, path) for path in files),
    )
    write_manifest(folder, manifest)


def rewrite_digests(folder):
    """Makes the records agree with the files: a bundle altered by someone who knows the format."""
    config = read_loader_config(folder)
    variants = tuple(
        variant._replace(files=tuple(entry(folder, file.path) for file in variant.files))
        for variant in config.variants
    )
    golden = config.golden._replace(file=entry(folder, config.golden.file.path))
    write_loader_config(folder, config._replace(variants=variants, golden=golden))
    write_record(folder)


IR_VERSION = 8
OPSET = 17
_FLOAT = 1
_INT64 = 7
_EXTERNAL = 1


def _varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def _field(number, value):
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _value(name, shape, code=_FLOAT):
    sizes = (_field(1, size) if isinstance(size, int) else _field(2, size) for size in shape)
    tensor = _field(1, code) + _field(2, b"".join(_field(1, size) for size in sizes))
    return _field(1, name) + _field(2, _field(1, tensor))


def _node(operator, inputs, output):
    return b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(4, operator)


def _tensor(name, array):
    shape = b"".join(_field(1, size) for size in array.shape)
    return shape + _field(2, _FLOAT) + _field(8, name) + _field(9, array.tobytes())


def _external_tensor(name, array, file, offset, tag_bits=0):
    entries = {"location": file, "offset": str(offset), "length": str(array.nbytes)}
    shape = b"".join(_field(1, size) for size in array.shape)
    texts = [_field(1, key) + _field(2, value) for key, value in entries.items()]
    places = b"".join(_varint((13 << 3 | 2) + tag_bits) + _varint(len(text)) + text for text in texts)
    return shape + _field(2, _FLOAT) + _field(8, name) + places + _field(14, _EXTERNAL)


def _model(nodes, tensors, inputs, outputs, types=None, versions=(IR_VERSION, OPSET)):
    codes, (ir_version, opset) = types or {}, versions
    graph = b"".join(
        [
            *(_field(1, node) for node in nodes),
            _field(2, "graph"),
            *(_field(5, tensor) for tensor in tensors),
            *(_field(11, _value(name, shape, codes.get(name, _FLOAT))) for name, shape in inputs.items()),
            *(_field(12, _value(name, shape, codes.get(name, _FLOAT))) for name, shape in outputs.items()),
        ]
    )
    return _field(1, ir_version) + _field(7, graph) + _field(8, _field(1, "") + _field(2, opset))


def write_linear(path, weights, batch="batch"):
    """Writes `y = x @ weights` with the weights in `<path>.data`; returns both files. x is (batch, rows)."""
    data = path.with_name(path.name + ".data")
    path.parent.mkdir(parents=True, exist_ok=True)
    data.write_bytes(weights.tobytes())
    rows, columns = weights.shape
    path.write_bytes(
        _model(
            [_node("MatMul", ("x", "w"), "y")],
            [_external_tensor("w", weights, data.name, 0)],
            {"x": (batch, rows)},
            {"y": (batch, columns)},
        )
    )
    return path, data


def write_chain(path, length):
    """Writes a model of `length` Relu nodes in a row, which takes long to load though it is small."""
    nodes = [_node("Relu", (f"t{i}",), f"t{i + 1}") for i in range(length)]
    path.write_bytes(_model(nodes, [], {"t0": (4,)}, {f"t{length}": (4,)}))
    return path


def endless_model(weights):
    """Returns `y = x @ weights + c`, x of (batch, rows): ONNX Runtime multiplies constants for hours."""
    rows, columns = weights.shape
    sizes = np.array([2000, 2000], np.int64)
    shape = _field(1, 2) + _field(2, _INT64) + _field(8, "sizes") + _field(9, sizes.tobytes())
    nodes = [
        _node("ConstantOfShape", ("sizes",), "c0"),
        *(_node("MatMul", (f"c{n}", "c0"), f"c{n + 1}") for n in range(500)),
        _node("ReduceMax", ("c500",), "c"),
        _node("MatMul", ("x", "w"), "z"),
        _node("Add", ("z", "c"), "y"),
    ]
    inputs = {"x": ("batch", rows)}
    return _model(nodes, [shape, _tensor("w", weights)], inputs, {"y": ("batch", columns)})


def add_model():
    """Returns `y = x + x` on two floats."""
    return _model([_node("Add", ("x", "x"), "y")], [], {"x": (2,)}, {"y": (2,)})


def one_node_model(operator, taken, given, *, opset=21):
    """Returns `x` [3] of type `taken` → `y` of type `given`, by one `Cast` or `Identity`."""
    to = _field(5, _field(1, "to") + _field(3, given) + _field(20, 2)) if operator == "Cast" else b""
    nodes, types = [_node(operator, ("x",), "y") + to], {"x": taken, "y": given}
    return _model(nodes, [], {"x": (3,)}, {"y": (3,)}, types, versions=(10, opset))


def operator_model(operators, inputs, outputs, types=None):
    """Returns a model of operators without attributes.

    Args:
        operators: Operator and input names, by the name of its output.
        inputs: Shapes by name.
        outputs: Likewise.
        types: Numbers of element types by name; float32 for others.
    """
    nodes = [_node(kind, names, output) for output, (kind, names) in operators.items()]
    return _model(nodes, [], inputs, outputs, types)


def refer_to(location, place, *, tag_bits=0):
    """Returns a model that answers `y = x @ w`, and somewhere refers to a file of external data.

    Args:
        location: What it names.
        place: `weights`: w itself; or, in what no run needs, a `constant`, a `sparse` one, a `subgraph`, a
            `function`, or the `default` of a function's attribute.
        tag_bits: Added to the tags of the weights' references.
    """
    weights = np.zeros((8, 4), np.float32)
    outside = _external_tensor("outside", weights, location, 0)
    hidden = _field(5, _field(1, "value") + _field(5, outside) + _field(20, 4))
    constant = _node("Constant", (), "unused") + hidden
    values = _external_tensor("", weights.ravel(), location, 0)
    indices = _field(1, 32) + _field(2, 7) + _field(9, np.arange(32, dtype=np.int64).tobytes())
    sparse = _field(1, values) + _field(2, indices) + _field(3, 8) + _field(3, 4)
    hidden_sparse = _field(5, _field(1, "sparse_value") + _field(22, sparse) + _field(20, 11))
    constants = {"constant": constant, "sparse": _node("Constant", (), "unused") + hidden_sparse}
    branch = _field(1, constant) + _field(2, "branch") + _field(12, _value("unused", (8, 4)))
    branches = b"".join(
        _field(5, _field(1, name) + _field(6, branch) + _field(20, 5))
        for name in ("then_branch", "else_branch")
    )
    choice = _node("If", ("yes",), "chosen") + branches
    extra = (constants | {"subgraph": choice}).get(place)
    nodes = [_node("MatMul", ("x", "w"), "y"), *filter(None, [extra])]
    inputs = {"x": ("batch", 8)}
    if place == "subgraph":
        inputs["yes"] = ()
    outer = _external_tensor("w", weights, location, 0, tag_bits)
    tensor = outer if place == "weights" else _tensor("w", weights)
    model = _model(nodes, [tensor], inputs, {"y": ("batch", 4)}, {"yes": 9})
    if place not in ("function", "default"):
        return model
    reference = _field(5, _field(1, "value") + _field(20, 4) + _field(21, "given"))
    default = _field(1, "given") + _field(5, outside) + _field(20, 4)
    inner = constant if place == "function" else _node("Constant", (), "unused") + reference
    body = _field(1, "Unused") + _field(5, "unused") + _field(7, inner) + _field(10, "local")
    body += _field(11, default) if place == "default" else b""
    return model + _field(25, body + _field(9, _field(1, "") + _field(2, OPSET)))
