"""Models that no spec can be written for are reported, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ortprep.adopt.adoption import adopt_models
from ortprep.adopt.observation import FeedRecord, ModelRecord, ProcessRecord
from ortprep.bundle.session_record import SessionOptionsRecord
from tests.builders import conv_net, embedding, sequence_input, write_model
from tests.runtime.builders import weights_of, write_linear

DEFAULTS = SessionOptionsRecord("ORT_ENABLE_ALL")


def record_of(path: Path | None, *, size_bytes: int = 0, modified_ns: int = 0) -> ModelRecord:
    if path is not None:
        status = path.stat()
        size_bytes, modified_ns = status.st_size, status.st_mtime_ns
    named = None if path is None else str(path)
    return ModelRecord(
        named, None, size_bytes, modified_ns, DEFAULTS, (), ("CPUExecutionProvider",), None, {}, 1, 0
    )


def process_of(*models: ModelRecord) -> ProcessRecord:
    return ProcessRecord(1, "python app.py", "1.31.1", models)


def adopt(folder: Path, *models: ModelRecord) -> list[tuple[str | None, str]]:
    process = process_of(*models)
    found = adopt_models([process], folder, folder / "configs")
    assert not list((folder / "configs").glob("*.yaml"))
    return [(model.name, model.problem) for model in found]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.unlink(), "can no longer be read: No such file"),
        (lambda path: path.write_bytes(b"another"), "changed since the application loaded it"),
    ],
)
def test_a_file_that_is_another_by_now_gets_no_spec(
    tmp_path: Path, change: Callable[[Path], object], reason: str
) -> None:
    path = write_model(conv_net(), tmp_path / "net.onnx")
    record = record_of(path)
    change(path)
    [(name, problem)] = adopt(tmp_path, record)
    assert (name, reason in problem) == (None, True)


def test_what_a_build_cannot_prepare_gets_no_spec(tmp_path: Path) -> None:
    ready = write_model(conv_net(), tmp_path / "net.ort")
    sequence = write_model(sequence_input(), tmp_path / "sequence.onnx")
    found = adopt(tmp_path, record_of(ready), record_of(sequence), record_of(None, size_bytes=2**33))
    assert [name for name, _ in found] == [None, None, None]
    for (_, problem), word in zip(found, ("own format", "not a tensor", "too large to keep"), strict=True):
        assert word in problem


def test_the_spec_counts_other_options(tmp_path: Path) -> None:
    record = record_of(write_model(conv_net(), tmp_path / "net.onnx"))
    records = [
        replace(record, options=SessionOptionsRecord("ORT_ENABLE_ALL", {"intra_op_num_threads": count}))
        for count in (1, 2)
    ]
    [model] = adopt_models([process_of(*records)], tmp_path, tmp_path / "configs")
    assert "with 1 other set of options" in (tmp_path / "configs" / f"{model.name}.yaml").read_text()


def test_ids_of_a_table_keep_their_values_under_every_shape(tmp_path: Path) -> None:
    def feed(*ids: int) -> FeedRecord:
        shape = (1, len(ids))
        return FeedRecord(1, {"ids": shape, "mask": shape}, {"ids": ids, "mask": (1,)})

    record = replace(
        record_of(write_model(embedding(), tmp_path / "words.onnx")),
        feeds=(feed(1, 2), feed(3, 8, 9)),
        runs=2,
        inputs={"ids": "tensor(int64)", "mask": "tensor(int64)"},
    )
    [model] = adopt_models([process_of(record)], tmp_path, tmp_path / "configs")
    assert (model.use.inputs["ids"].values, model.left_out) == ((1, 2, 3, 8, 9), ())


def test_equal_graphs_with_other_external_weights_are_other_models(tmp_path: Path) -> None:
    paths = [write_linear(tmp_path / f"{seed}/linear.onnx", weights_of(seed % 2))[0] for seed in (1, 2, 3)]
    assert len({path.read_bytes() for path in paths}) == 1
    found = adopt_models([process_of(*map(record_of, paths))], tmp_path, tmp_path / "configs")
    assert [(model.model, model.use.loads) for model in found] == [(str(paths[0]), 2), (str(paths[1]), 1)]
