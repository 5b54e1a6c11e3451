"""Bound runs answer as plain ones do, and from the same memory every time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortprep.bundle.loader_config import read_loader_config, write_loader_config
from ortprep.errors import LoadError
from ortprep.runtime import load
from ortprep.runtime.loading.binding import BoundRun, BoundRuns, run_once
from ortprep.runtime.tensors.arrays import run_session
from tests.runtime.builders import sample, weights_of, write_bundle, write_record

pytestmark = pytest.mark.runtime


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "bundle")


def test_a_bound_run_answers_as_a_plain_one(bundle):
    session = load(bundle)
    feeds = {"x": sample()}
    bound, plain = run_once(session, feeds, io_binding=True), run_session(session, feeds)
    assert list(bound) == list(plain)
    np.testing.assert_array_equal(bound["y"], plain["y"])
    np.testing.assert_allclose(bound["y"], sample() @ weights_of(0), rtol=1e-4)


def test_a_bound_run_gives_its_outputs_in_the_same_memory_every_time(bundle):
    run = BoundRun(load(bundle), {"x": sample()})
    addresses = set()
    for _ in range(5):
        run()
        addresses.add(run.addresses()["y"])
    assert len(addresses) == 1
    np.testing.assert_allclose(run.outputs()["y"], sample() @ weights_of(0), rtol=1e-4)


def test_bound_runs_answer_batches_of_any_shapes_as_plain_ones_do(bundle):
    session = load(bundle)
    runs, answers = BoundRuns(session), []
    batches = [sample()[:rows] * factor for factor in (1, 2, 3) for rows in (2, 1, 2)]
    for x in batches:
        before = x.copy()
        answers.append(runs.run({"x": x})["y"])
        np.testing.assert_array_equal(x, before, err_msg="a caller's batch was written to")
    # Compared after all runs, so that answers whose memory is used again would be noticed.
    for x, answer in zip(batches, answers, strict=True):
        np.testing.assert_array_equal(answer, run_session(session, {"x": x})["y"])


def mark_bound(bundle: Path) -> None:
    config = read_loader_config(bundle)
    variants = tuple(dataclasses.replace(variant, io_binding=True) for variant in config.variants)
    write_loader_config(bundle, dataclasses.replace(config, variants=variants))
    write_record(bundle)


def test_f20_the_golden_sample_is_run_bound_where_the_variant_asks_for_it(bundle, monkeypatch):
    mark_bound(bundle)

    calls: list[str] = []
    for name in ("run", "run_with_iobinding"):
        monkeypatch.setattr(onnxruntime.InferenceSession, name, _noting(name, calls))
    load(bundle, check="golden")
    assert set(calls) == {"run_with_iobinding"}


def _noting(name: str, calls: list[str]) -> Callable[..., Any]:
    method = getattr(onnxruntime.InferenceSession, name)

    def noting(*arguments: Any) -> Any:
        calls.append(name)
        return method(*arguments)

    return noting


def test_f20_a_wrong_answer_of_a_bound_run_is_told(bundle, tmp_path):
    mark_bound(bundle)
    other = write_bundle(tmp_path / "other", seed=1)
    (bundle / "golden.npz").write_bytes((other / "golden.npz").read_bytes())
    with pytest.raises(LoadError, match="does not answer as recorded"):
        load(bundle, check="golden", digests="off")
