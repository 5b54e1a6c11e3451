"""A job that says where the time of its start goes: python timed_job.py model.onnx, or a bundle's folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def since_start() -> float:
    """Returns the milliseconds since the kernel started this process, in steps of 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return 1000 * (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


marks = [("Python itself", since_start())]

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402

is_bundle = Path(sys.argv[1]).is_dir()
if is_bundle:
    from ortprep.runtime import load

marks.append(("imports", since_start()))

if is_bundle:
    session = load(sys.argv[1])
else:
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
marks.append(("session", since_start()))

session.run(None, {"x": np.zeros((1, 3, 48, 480), np.float32)})
marks.append(("first run", since_start()))

before = 0.0
for name, at in marks:
    print(f"{name:14}{at - before:6.0f} ms")
    before = at
print(f"{'in all':14}{before:6.0f} ms")
