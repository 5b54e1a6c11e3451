"""Whatever ONNX Runtime wrote, every tensor of a data file begins on a page and has the bytes that it had."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.options import PAGE_BYTES, with_external_data
from ortprep.runtime.loading.session import CPU, build_session, default_plan
from ortprep.stages.optimize.alignment import align_external_data
from tests import builders as models
from tests.stages.optimize.builders import Build

DATA = "m.onnx.data"
SIZES = (70, 900, 333, 700, 64)
"""Sizes of layers whose weights are 168 kB to 1.2 MB, none of them a multiple of a page."""


def chain() -> onnx.ModelProto:
    rng, names = np.random.default_rng(0), [f"h{i}" for i in range(len(SIZES))]
    return models.build_model(
        [onnx.helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(len(SIZES) - 1)],
        inputs=[models.value("h0", onnx.TensorProto.FLOAT, ["batch", SIZES[0]])],
        outputs=[models.value(names[-1], onnx.TensorProto.FLOAT, ["batch", SIZES[-1]])],
        initializers=[
            models.tensor(f"w{i}", rng.standard_normal((rows, columns), np.float32) / rows**0.5)
            for i, (rows, columns) in enumerate(pairwise(SIZES))
        ],
    )


def offsets(model: Path) -> dict[str, int]:
    """Returns where the weights of a model begin that are outside."""
    graph = onnx.load(model, load_external_data=False).graph
    return {
        tensor.name: int({entry.key: entry.value for entry in tensor.external_data}["offset"])
        for tensor in graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }


@pytest.mark.parametrize("variant", ["cpu", "portable"])
def test_every_weight_outside_a_prepared_graph_begins_on_a_page(tmp_path: Path, variant: str) -> None:
    build, source = Build(tmp_path), chain()
    models.write_model(source, build.source / "model.onnx")
    result = build.optimize(variant, inputs={"h0": {"shapes": [[2, SIZES[0]]]}})
    found = offsets(build.folder / result.model)
    assert len(found) == len(SIZES) - 1
    assert [offset % PAGE_BYTES for offset in found.values()] == [0] * len(found)
    plain = sum(len(tensor.raw_data) for tensor in source.graph.initializer)
    written = (build.folder / f"{result.model}.data").stat().st_size
    assert plain <= written < plain + PAGE_BYTES * len(found)


def test_saved_copies_of_prepacking_move_with_their_weights(tmp_path: Path) -> None:
    source, written = models.write_model(chain(), tmp_path / "source.onnx"), tmp_path / "m.onnx"
    entries = {"session.save_external_prepacked_constant_initializers": "1", **with_external_data(written)}
    attributes = {"optimized_model_filepath": str(written)}
    build_session(
        default_plan(str(source), CPU, level="ORT_DISABLE_ALL", attributes=attributes, config_entries=entries)
    )
    model = onnx.load(written, load_external_data=False)
    blocks = read_blocks(model, tmp_path / DATA)
    assert any(key.startswith("prepacked_") for _, key in blocks)

    assert align_external_data(model, tmp_path / DATA)
    assert read_blocks(model, tmp_path / DATA) == blocks
    written.write_bytes(model.SerializeToString())
    feeds = {"h0": np.ones((2, SIZES[0]), np.float32)}
    expected, answer = (
        onnxruntime.InferenceSession(path, providers=[CPU]).run(None, feeds)[0] for path in (source, written)
    )
    np.testing.assert_allclose(answer, expected, rtol=1e-5)


def read_blocks(model: onnx.ModelProto, data: Path) -> dict[tuple[str, str], bytes]:
    """Returns the bytes of every tensor, and of every arranged copy, by tensor and key."""
    content, found = data.read_bytes(), {}
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if not entries:
            continue
        start = int(entries["offset"])
        found[tensor.name, "offset"] = content[start : start + int(entries["length"])]
        for key, value in entries.items():
            if key.startswith("prepacked_"):
                for number, block in enumerate(value.split("|")[1:]):
                    start, length, _ = map(int, block.split(";"))
                    found[tensor.name, f"{key}.{number}"] = content[start : start + length]
    return found


@given(
    lengths=st.lists(st.integers(0, 3 * PAGE_BYTES), min_size=1, max_size=12),
    gaps=st.lists(st.integers(0, 2 * PAGE_BYTES), min_size=12, max_size=12),
)
def test_no_byte_of_a_tensor_changes_wherever_it_was(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], gaps: list[int]
) -> None:
    data = tmp_path_factory.mktemp("aligned") / DATA
    rng, content, initializers = np.random.default_rng(len(lengths)), b"", []
    for index, (length, gap) in enumerate(zip(lengths, gaps, strict=False)):
        content += rng.bytes(gap)
        tensor = models.tensor(f"t{index}", np.zeros(length, np.uint8))
        models.point_outside(tensor, DATA, offset=len(content), length=length)
        initializers.append(tensor)
        content += rng.bytes(length)
    data.write_bytes(content)
    model = models.build_model([], inputs=[], outputs=[], initializers=initializers)
    before = read_blocks(model, data)

    align_external_data(model, data)
    assert read_blocks(model, data) == before
    assert not align_external_data(model, data)
    starts = [int(e.value) for t in model.graph.initializer for e in t.external_data if e.key == "offset"]
    assert all(start % PAGE_BYTES == 0 for start in starts)
