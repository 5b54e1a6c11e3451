"""A node that serves needs Ray and what a runtime job needs, and nothing of the build."""

import subprocess
import sys

BUILD = {"onnx", "doit", "typer", "ortprep.stages", "ortprep.build", "ortprep.tuning"}


def test_nothing_of_the_build_is_needed():
    modules = (
        "ortprep.cluster.serving.deployment",
        "ortprep.cluster.serving.pinning",
        "ortprep.cluster.data",
    )
    code = f"import {', '.join(modules)}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not BUILD & set(done.stdout.split())
