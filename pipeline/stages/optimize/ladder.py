"""The optimisation ladder: how far a graph is optimised, and what is tried when that does not hold."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import StageError
from pipeline.stages.contract import PORTABLE

ALL, ALL_REDUCED, EXTENDED, BASIC, SOURCE = "all", "all-reduced", "extended", "basic", "source"

HARDWARE_BOUND_OPTIMIZERS = ("NchwcTransformer", "NhwcTransformer")
"""What ALL runs beyond EXTENDED and binds a graph to a machine: blocked and channels-last layouts.

Names as ONNX Runtime's verbose log gives them (1.31.1); a version that lacks one ignores its name. Both act
on nodes that run on CPU, of which a graph for CUDA may have some too. The copies between devices that a CUDA
session adds cannot be switched off here: they come after the optimisers (see `repairs`).
"""


@dataclass(frozen=True)
class Step:
    """One way to make the file.

    Attributes:
        name: `all`, `all-reduced`, `extended`, `basic` or `source`.
        level: Name of the `GraphOptimizationLevel` of the session that writes it, None for `source`, which is
            copied.
        disabled_optimizers: Optimisers that session leaves out, by name.
    """

    name: str
    level: str | None
    disabled_optimizers: tuple[str, ...] = ()


def plan_ladder(variant: str, *, level: str, disabled_optimizers: tuple[str, ...] = ()) -> tuple[Step, ...]:
    """Returns the steps in the order they are tried; the last one is always the source.

    Args:
        variant: A target, or `portable`, which never goes above BASIC: only that level stays within ONNX's
            own operators.
        level: Where the user starts: `all`, `extended` or `basic`.
        disabled_optimizers: Optimisers the user leaves out of every step.

    Raises:
        StageError: There is no such level.
    """
    reduced = tuple(dict.fromkeys((*disabled_optimizers, *HARDWARE_BOUND_OPTIMIZERS)))
    steps = (
        Step(ALL, "ORT_ENABLE_ALL", disabled_optimizers),
        Step(ALL_REDUCED, "ORT_ENABLE_ALL", reduced),
        Step(EXTENDED, "ORT_ENABLE_EXTENDED", disabled_optimizers),
        Step(BASIC, "ORT_ENABLE_BASIC", disabled_optimizers),
        Step(SOURCE, None),
    )
    start = BASIC if variant == PORTABLE else level
    names = [step.name for step in steps]
    if start not in names:
        raise StageError(f"no such optimisation level: {start!r}\n  expected one of {', '.join(names)}")
    planned = steps[names.index(start) :]
    # Nothing is learnt from a second try that would leave out the same.
    return tuple(
        step for step in planned if step.name != ALL_REDUCED or set(reduced) != set(disabled_optimizers)
    )
