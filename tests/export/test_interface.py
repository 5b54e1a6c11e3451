"""What an exported variant takes and gives, where there was a session to ask and where there was none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2 as messages

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import FileEntry, Golden, LoaderConfig, TensorSpec, Tolerance
from ortprep.errors import ExportError
from ortprep.export.model_config import add_warm_up, describe_tensor, resolve_interface
from ortprep.export.placement import TrialResult
from tests.export.builders import make_variant

ABSENT = TrialResult(missing=("expected a GPU",))
CONFIG = LoaderConfig(
    "1.2",
    "net",
    inputs=(TensorSpec("x", "float32", ("batch", None, 3)), TensorSpec("ids", "int64", ("batch",))),
    outputs=(TensorSpec("y", "float32", ("batch", "n")), TensorSpec("z", "float32", None)),
    golden=Golden(FileEntry("golden.npz", 1, digest_bytes(b"g")), Tolerance(0, 0)),
    variants=(make_variant(),),
)


def test_without_a_session_sizes_are_those_the_variant_is_bound_to():
    variant = dataclasses.replace(make_variant(), binding={"batch": 4, "x[1]": 7})
    inputs, outputs = resolve_interface(CONFIG, variant, ABSENT, {})
    assert [one.shape for one in (*inputs, *outputs)] == [(4, 7, 3), (4,), (4, "n"), None]


def test_a_session_has_the_last_word():
    said = (TensorSpec("x", "float16", (1, 2)),)
    assert resolve_interface(CONFIG, make_variant(), TrialResult((), said, said), {}) == (said, said)


def test_an_unknown_rank_is_not_taken_for_a_scalar():
    trial = TrialResult((), (TensorSpec("x", "float32", ()),), (TensorSpec("y", "float32", ()),))
    inputs, outputs = resolve_interface(CONFIG, make_variant(), trial, {"x": (), "y": (2, 2)})
    assert (inputs[0].shape, outputs[0].shape) == ((), None)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (TensorSpec("x", "float8e4m3fn", (1,)), "float8e4m3fn"),
        (TensorSpec("x", "seq(tensor(float))", ()), "seq"),
        (TensorSpec("x", "float32", None), "number of axes"),
        (TensorSpec("x", "float32", (0, 3)), "sizes of 1 and more"),
    ],
)
def test_what_triton_has_no_word_for_is_refused(spec, expected):
    with pytest.raises(ExportError, match=expected):
        describe_tensor(messages.ModelInput(), spec, batched=False)


def test_a_scalar_per_row_is_reshaped():
    tensor = messages.ModelInput()
    describe_tensor(tensor, TensorSpec("x", "float32", ("batch",)), batched=True)
    assert (list(tensor.dims), tensor.HasField("reshape")) == ([1], True)


def test_a_sample_that_is_no_batch_makes_no_warm_up():
    config = messages.ModelConfig(max_batch_size=4)
    for name in ("x", "y"):
        describe_tensor(config.input.add(), TensorSpec(name, "float32", ("b", 2)), batched=True)
    feeds = {"x": np.ones((2, 2), np.float32), "y": np.ones((3, 2), np.float32)}
    assert add_warm_up(config, feeds) == "the inputs of the golden sample are not of one batch size"
    assert add_warm_up(config, {"x": feeds["x"]}) == "the golden sample has no y"
    assert not config.model_warmup
