"""Figures as people read them."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")
_STEP = 1000


def phrase_bytes(count: float) -> str:
    """Returns a size: `64.2 MB`."""
    unit = 0
    while count >= _STEP and unit < len(_UNITS) - 1:
        count /= _STEP
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"


def phrase_speed(bytes_per_s: float) -> str:
    """Returns a speed: `1.04 GB/s`."""
    return f"{phrase_bytes(bytes_per_s)}/s"


def phrase_provider(name: str) -> str:
    """Returns a provider without the words that all of them end in: `CUDA`."""
    return name.removesuffix("ExecutionProvider")
