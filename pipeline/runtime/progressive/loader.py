"""Loading in two phases: ready as soon as the fast plan is, soon after as fast per run as the steady one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Unpack

from ortprep.runtime.loading.bundle_loader import make_session, open_bundle
from ortprep.runtime.loading.load_options import NO_DEADLINE, check_choice

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.loading.bundle_loader import OpenedBundle
    from ortprep.runtime.loading.load_options import Cancellation, LoadArguments
    from ortprep.runtime.progressive.session import ProgressiveSession

BuildStart = Literal["first_run", "now"]
"""`first_run`: the steady session is made once a first run is done, or someone waits for it; `now`: at once,
so that the first run shares the processor with it."""


def load_progressive(
    bundle: str | os.PathLike[str],
    *,
    steady_after: BuildStart = "first_run",
    **options: Unpack[LoadArguments],
) -> ProgressiveSession:
    """Opens a bundle as `load` does, on the variant's first phase; its steady session follows by itself.

    The steady session is made by a thread and takes over between two runs. Where the variant records no first
    phase, it is made at once. If it cannot be made, the first stays in service, and why is logged at WARNING.

    Args:
        bundle: As for `load`.
        steady_after: When the steady session begins to be made: after the `first_run`, so that it takes
            nothing from it, or `now`. `wait_steady` has it made in any case.
        **options: Every other argument of `load`, for both sessions. `check="golden"` checks the first
            session before it is returned, the steady one before it takes over. `timeout_s` is for the first
            session; the steady one may take as long as it needs.

    Raises:
        PipelineError: As `load` does.
    """
    check_choice("steady_after", steady_after, ("first_run", "now"))
    opened = open_bundle(bundle, plan="first", **options)
    from ortprep.runtime.progressive.session import ProgressiveSession
    from ortprep.runtime.progressive.swapper import SessionSwapper

    resolved = opened.resolved
    build = None if resolved.first is None else _steady_build(opened)
    swapper = SessionSwapper(opened.session, build, name=f"variant {resolved.name} of {resolved.root}")
    if steady_after == "now":
        swapper.start()
    return ProgressiveSession(swapper)


def _steady_build(opened: OpenedBundle) -> Callable[[Cancellation], onnxruntime.InferenceSession]:
    # Not `opened` itself, which holds the first session.
    resolved, options = opened.resolved, opened.options.replace(plan="steady", deadline=NO_DEADLINE)

    def build(cancellation: Cancellation) -> onnxruntime.InferenceSession:
        _, session = make_session(resolved, options, cancellation=cancellation)
        return session

    return build
