"""Questions about speed and coverage, one per file; results are JSON that carries the machine."""
