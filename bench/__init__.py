"""Questions about speed and coverage, one per file; results are JSON that carries the machine."""

from pipeline.telemetry import disable_telemetry

disable_telemetry()
