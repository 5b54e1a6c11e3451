"""A bundle prepared on one instruction set and loaded on another, on an emulated processor."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ortprep.runtime.machine.hardware import read_hardware
from tests.runtime.builders import CPU_ONLY, write_bundle

pytestmark = [
    pytest.mark.runtime,
    pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed"),
    pytest.mark.skipif(
        "avx512f" not in read_hardware(gpus=False).cpu_features, reason="this processor has no AVX-512"
    ),
]

SCRIPT = """
import sys
from ortprep.runtime.machine.hardware import nchwc_block_size, read_hardware
from ortprep.runtime.loading.bundle_loader import open_bundle
opened = open_bundle(sys.argv[1], check="golden")
print(opened.variant.name, nchwc_block_size(read_hardware()), *opened.passed_over)
"""


def load_on(processor: str, bundle: Path) -> str:
    done = subprocess.run(
        ["qemu-x86_64", "-cpu", processor, sys.executable, "-c", SCRIPT, str(bundle)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_prepared_with_avx512_and_loaded_without_takes_the_portable_variant(tmp_path):
    wide = dataclasses.replace(CPU_ONLY, cpu_features=("avx512f",))
    bundle = write_bundle(tmp_path / "b", requirements={"cpu": wide, "portable": CPU_ONLY})
    said = load_on("Haswell", bundle)
    assert said == "portable 8 cpu: expected a processor with avx512f, got one without"
