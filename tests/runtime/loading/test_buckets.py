"""Buckets behind one `load`: a batch runs on the variant that is there for its sizes, unknown to its
caller."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ortprep.errors import IntegrityError, LoadError
from ortprep.runtime import load, session_for
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import (
    BUCKETED,
    UNMET,
    Part,
    batch_of,
    rewrite_digests,
    weights_of,
    write_converted,
)

pytestmark = pytest.mark.runtime

FP32, INT8, FP32_4, FP32_8, INT8_4 = range(5)
"""What each variant of `BUCKETED` answers with."""
BUCKET_MODEL = "cpu-batch4/linear_optimized.onnx"


@pytest.fixture
def bundle(tmp_path):
    return write_converted(tmp_path / "bundle")


def seed_of(answer, size):
    """Returns which variant answered to `batch_of(size)`."""
    (seed,) = (s for s in range(5) if np.allclose(answer, batch_of(size) @ weights_of(s), atol=1e-4))
    return seed


def asked(session, size):
    (answer,) = session.run(None, {"x": batch_of(size)})
    return seed_of(answer, size)


@pytest.mark.parametrize(
    ("precision", "by_size"),
    [
        ("fp32", {1: FP32, 4: FP32_4, 5: FP32, 8: FP32_8}),
        ("int8", {1: INT8, 4: INT8_4, 5: INT8, 8: INT8}),
        ("fastest-within-gate", {1: FP32, 4: FP32_4}),
    ],
)
def test_f22_every_batch_goes_to_the_variant_for_its_sizes_in_the_precision_asked_for(
    bundle, precision, by_size
):
    bucketed = load(bundle, precision=precision, check="golden")
    for _ in range(2):
        assert {size: asked(bucketed, size) for size in by_size} == by_size


def test_a_bucket_is_made_when_a_batch_first_needs_it_and_never_again(bundle, sessions):
    bucketed = load(bundle)
    counts = []
    for size in (1, 8, 8, 4, 8):
        asked(bucketed, size)
        counts.append(len(sessions))
    assert counts == [1, 2, 2, 3, 3]


def test_threads_that_need_the_same_bucket_make_it_once(bundle, sessions):
    barrier = threading.Barrier(8)

    def ask(number):
        barrier.wait(300)
        return asked(bucketed, (4, 8)[number % 2])

    bucketed = load(bundle)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == [FP32_4, FP32_8] * 4
    assert len(sessions) == 3


def test_the_session_of_some_shapes_can_be_had_before_the_first_batch(bundle, sessions):
    bucketed = load(bundle)
    ahead = session_for(bucketed, {"x": (8, 8)})
    assert asked(ahead, 8) == asked(bucketed, 8) == FP32_8
    assert len(sessions) == 2


def test_what_is_asked_of_the_session_is_answered_for_all_shapes(bundle):
    plain = load(bundle)
    bucketed = load(bundle)
    asked(bucketed, 4)
    assert bucketed.get_inputs()[0].shape == plain.get_inputs()[0].shape == ["batch", 8]
    assert [output.name for output in bucketed.get_outputs()] == ["y"]
    assert bucketed.get_providers() == plain.get_providers()
    binding = bucketed.io_binding()
    binding.bind_cpu_input("x", batch_of(4))
    binding.bind_output("y")
    bucketed.run_with_iobinding(binding)
    assert seed_of(binding.copy_outputs_to_cpu()[0], 4) == FP32


def test_a_bucket_that_this_machine_cannot_run_is_passed_over_aloud(tmp_path, caplog):
    parts = (Part("cpu", seed=0), Part("cpu-batch4", seed=2, batch=4, requirements=UNMET))
    bucketed = load(write_converted(tmp_path / "b", parts))
    with caplog.at_level(logging.WARNING):
        assert asked(bucketed, 4) == 0
    assert "bucket passed over: cpu-batch4: expected ONNX Runtime >= 99.0" in caplog.text


def test_a_bucket_that_cannot_be_loaded_is_the_error_of_its_batches_until_it_can(bundle):
    model = bundle / BUCKET_MODEL
    whole = model.read_bytes()
    bucketed = load(bundle, digests="off")
    model.write_bytes(b"no model")
    for _ in range(2):
        with pytest.raises(LoadError, match="ONNX Runtime cannot load"):
            asked(bucketed, 4)
        assert asked(bucketed, 5) == FP32
    model.write_bytes(whole)
    assert asked(bucketed, 4) == FP32_4


def test_one_changed_byte_of_a_bucket_is_reported_before_it_is_used(bundle):
    bucketed = load(bundle)
    data = bundle / f"{BUCKET_MODEL}.data"
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    with pytest.raises(IntegrityError):
        asked(bucketed, 4)
    assert asked(bucketed, 1) == FP32


def test_f24_a_bucket_is_checked_with_answers_of_its_own(bundle):
    wrong = {"input:x": batch_of(4), "output:y": batch_of(4) @ weights_of(FP32)}
    write_tensors(bundle / "cpu-batch4/golden.npz", wrong)
    rewrite_digests(bundle)
    bucketed = load(bundle, check="golden", digests="off")
    with pytest.raises(LoadError, match=r"'cpu-batch4'.*does not answer as recorded"):
        asked(bucketed, 4)
    assert asked(bucketed, 8) == FP32_8


def test_f17_buckets_of_another_build_are_never_mixed_in(bundle, tmp_path):
    bucketed = load(bundle, digests="off")
    bundle.rename(tmp_path / "old")
    write_converted(bundle, BUCKETED[:-1])
    with pytest.raises(LoadError, match="replaced by another build"):
        asked(bucketed, 4)


def test_f23_a_bucket_is_loaded_alone_only_by_its_name(bundle):
    assert asked(load(bundle, target="cpu-batch4", check="golden"), 4) == FP32_4
