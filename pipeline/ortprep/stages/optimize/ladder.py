"""The optimisation ladder: how far a graph is optimised, and what is tried when that does not hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ortprep.stages.core.contract import PORTABLE

ALL, ALL_REDUCED, EXTENDED, BASIC, SOURCE = "all", "all-reduced", "extended", "basic", "source"
BASIC_ONLY = "basic-only"

_LEVELS = {ALL: "ORT_ENABLE_ALL", EXTENDED: "ORT_ENABLE_EXTENDED", BASIC: "ORT_ENABLE_BASIC"}

HARDWARE_BOUND_OPTIMIZERS = ("NchwcTransformer", "NhwcTransformer")
"""What ALL runs beyond EXTENDED and binds a graph to a machine: blocked and channels-last layouts.

Names as ONNX Runtime's verbose log gives them (1.31.1); a version that lacks one ignores its name. Both act
on nodes that run on CPU; a graph for CUDA may have such nodes too. The copies between devices that a CUDA
session adds cannot be switched off here: they come after the optimisers (see `repairs`).
"""


@dataclass(frozen=True)
class Step:
    """One way to make the file.

    Attributes:
        name: `all`, `all-reduced`, `extended`, `basic`, `basic-only` or `source`.
        level: Name of the `GraphOptimizationLevel` of the session that writes it, None for `source`, which is
            copied.
        disabled_optimizers: Optimisers that session leaves out, by name.
        loading_level: Level of the sessions that load it.
    """

    name: str
    level: str | None
    disabled_optimizers: tuple[str, ...] = ()
    loading_level: str = "ORT_DISABLE_ALL"


def plan_ladder(variant: str, *, level: str, disabled_optimizers: tuple[str, ...] = ()) -> tuple[Step, ...]:
    """Returns the steps in the order they are tried; the last one is always the source.

    Args:
        variant: A target, or `portable`, which is never written above BASIC: only that level stays within
            ONNX's own operators. Its loads optimise it further, for the machine that they find themselves on,
            up to the user's level; `basic-only` is what is tried where that fails.
        level: Where the user starts: `all`, `extended` or `basic`.
        disabled_optimizers: Optimisers the user leaves out of every step.
    """
    reduced = tuple(dict.fromkeys((*disabled_optimizers, *HARDWARE_BOUND_OPTIMIZERS)))
    # The source is not prepared, so its loads optimise it, as plain ONNX Runtime does.
    source = Step(SOURCE, None, loading_level=_LEVELS[ALL])
    basic = Step(BASIC, _LEVELS[BASIC], disabled_optimizers)
    if variant == PORTABLE:
        for_the_machine = replace(basic, loading_level=_LEVELS[level])
        return (for_the_machine, replace(basic, name=BASIC_ONLY), source)
    steps = (
        Step(ALL, _LEVELS[ALL], disabled_optimizers),
        Step(ALL_REDUCED, _LEVELS[ALL], reduced),
        Step(EXTENDED, _LEVELS[EXTENDED], disabled_optimizers),
        basic,
        source,
    )
    planned = steps[[step.name for step in steps].index(level) :]
    # Nothing is learnt from a second try that would leave out the same.
    return tuple(
        step for step in planned if step.name != ALL_REDUCED or set(reduced) != set(disabled_optimizers)
    )
