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
    """Opens a bundle as `load` does, on the variant's first phase; the steady session follows automatically.

    A thread creates the steady session, which takes over between two runs. If the variant records no first
    phase, the session is the steady one from the start. If the steady session cannot be created, the first
    one stays in service, and the reason is logged at WARNING.

    Args:
        bundle: As for `load`.
        steady_after: When to start creating the steady session: after the `first_run`, so that it does not
            slow that run down, or `now`. `wait_steady` starts it in either case.
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
