"""A node that serves needs Ray and what a runtime job needs, and nothing of the build."""

from __future__ import annotations

import subprocess
import sys

BUILD = {"onnx", "doit", "typer", "ortprep.stages", "ortprep.build", "ortprep.tuning"}


def brought_in(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_itself_brings_in_next_to_nothing():
    assert not {"ray", "numpy", "onnxruntime"} & brought_in("import ortprep.cluster")


def test_a_name_needs_ray_only_where_ray_made_it():
    names = "OnnxPredictor, ServeConfig, pin_bundle"
    assert not {"ray", *BUILD} & brought_in(f"from ortprep.cluster import {names}")


def test_nothing_of_the_build_is_needed():
    serving = ("deployment", "application", "pinning")
    modules = [*(f"ortprep.cluster.serving.{name}" for name in serving), "ortprep.cluster.data"]
    assert not BUILD & brought_in(f"import {', '.join(modules)}")
