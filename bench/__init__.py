"""Benchmarks of speed and coverage, one question per file. Results are JSON files that name the machine."""

import os

from ortprep.telemetry import disable_telemetry

disable_telemetry()
# Where it is set, and the packages have no bytecode, every process that is timed compiles numpy again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
