"""What an exported variant takes and gives, where there was a session to ask and where there was none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import FileEntry, Golden, LoaderConfig, TensorSpec, Tolerance
from ortprep.errors import ExportError
from ortprep.export.interface import resolve_interface
from ortprep.export.trial import TrialRun
from ortprep.export.triton.tensors import describe_tensor, plan_warm_up
from tests.export.builders import make_variant

ABSENT = TrialRun(missing=("expected a GPU",))
CONFIG = LoaderConfig(
    "1.2",
    "net",
    inputs=(TensorSpec("x", "float32", ("batch", None, 3)), TensorSpec("ids", "int64", ("batch",))),
    outputs=(TensorSpec("y", "float32", ("batch", "n")), TensorSpec("z", "float32", None)),
    golden=Golden(FileEntry("golden.npz", 1, digest_bytes(b"g")), Tolerance(0, 0)),
    variants=(make_variant(),),
)


def test_without_a_session_sizes_are_those_the_variant_is_bound_to() -> None:
    variant = dataclasses.replace(make_variant(), binding={"batch": 4, "x[1]": 7})
    inputs, outputs = resolve_interface(CONFIG, variant, ABSENT, {})
    assert [one.shape for one in (*inputs, *outputs)] == [(4, 7, 3), (4,), (4, "n"), None]


def test_without_a_session_half_precision_is_where_the_bundle_lists_float32() -> None:
    variant = dataclasses.replace(make_variant(), half_io=True)
    inputs, outputs = resolve_interface(CONFIG, variant, ABSENT, {})
    assert [one.dtype for one in (*inputs, *outputs)] == ["float16", "int64", "float16", "float16"]


def test_a_session_has_the_last_word() -> None:
    said = (TensorSpec("x", "float16", (1, 2)),)
    assert resolve_interface(CONFIG, make_variant(), TrialRun((), said, said), {}) == (said, said)


def test_an_unknown_rank_is_not_taken_for_a_scalar() -> None:
    trial = TrialRun((), (TensorSpec("x", "float32", ()),), (TensorSpec("y", "float32", ()),))
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
def test_what_triton_has_no_word_for_is_refused(spec: TensorSpec, expected: str) -> None:
    with pytest.raises(ExportError, match=expected):
        describe_tensor(spec, batched=False)


def test_a_scalar_per_row_is_reshaped() -> None:
    tensor = describe_tensor(TensorSpec("x", "float32", ("batch",)), batched=True)
    assert (tensor.dims, tensor.scalar) == ((1,), True)


def test_a_sample_that_is_no_batch_makes_no_warm_up() -> None:
    specs = [TensorSpec(name, "float32", ("b", 2)) for name in ("x", "y")]
    tensors = [describe_tensor(one, batched=True) for one in specs]
    feeds = {"x": np.ones((2, 2), np.float32), "y": np.ones((3, 2), np.float32)}
    assert plan_warm_up(tensors, feeds, max_batch_size=4) == (
        "the inputs of the golden sample are not of one batch size"
    )
    assert plan_warm_up(tensors, {"x": feeds["x"]}, max_batch_size=4) == "the golden sample has no y"
