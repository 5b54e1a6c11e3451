"""Benchmarks of speed and coverage, one question per file. Results are JSON files that name the machine."""

from ortprep.telemetry import disable_telemetry

disable_telemetry()
