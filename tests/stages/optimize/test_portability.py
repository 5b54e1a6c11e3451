"""What is prepared with AVX-512 and run without it: on another processor, emulated."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest

from ortprep.runtime.loading.bundle_loader import open_bundle
from ortprep.runtime.machine.hardware import read_hardware
from tests.stages.optimize.builders import assert_falls_back, prepare, run_elsewhere

EMULATOR = shutil.which("qemu-x86_64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(EMULATOR is None, reason="needs qemu-x86_64 (Debian package qemu-user)"),
    pytest.mark.skipif(
        "avx512f" not in read_hardware(gpus=False).cpu_features,
        reason="needs a processor with AVX-512 to prepare on",
    ),
]


@pytest.fixture(scope="module", params=[8, 32], ids=["half a block", "whole blocks"])
def elsewhere(request, tmp_path_factory):
    prepared = prepare(tmp_path_factory.mktemp("net"), channels=request.param)
    here = open_bundle(prepared.bundle)
    assert here.variant.name == "cpu", here.passed_over
    return prepared, run_elsewhere(prepared, [str(EMULATOR), "-cpu", "Haswell", sys.executable])


def test_the_processor_is_asked_and_not_the_systems_list(elsewhere):
    assert "avx2" in elsewhere[1]["features"]
    assert "avx512f" not in elsewhere[1]["features"]


def test_load_takes_the_portable_variant_optimises_it_there_and_answers_correctly(elsewhere):
    assert_falls_back(*elsewhere, reason="avx512f")


def test_without_requirements_the_other_variant_would_fail_or_answer_wrongly(elsewhere):
    """It is loud only where channels do not fill a block: microsoft/onnxruntime #26174."""
    prepared, answer = elsewhere
    if isinstance(answer["unsafe"], str):
        assert "block" in answer["unsafe"]
    else:
        assert not np.allclose(answer["unsafe"], prepared.expected, rtol=1e-2)
