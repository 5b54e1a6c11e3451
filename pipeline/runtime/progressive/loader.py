"""Loading in two phases: ready as soon as the fast plan is, soon after as fast per run as the steady one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from ortprep.runtime.loading.bundle_loader import make_session, open_bundle
from ortprep.runtime.loading.load_options import NO_DEADLINE, CheckPolicy, DigestPolicy, check_choice

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.loading.bundle_loader import OpenedBundle
    from ortprep.runtime.loading.load_options import Cancellation, SessionOptions
    from ortprep.runtime.progressive.session import ProgressiveSession

BuildStart = Literal["first_run", "now"]
"""`first_run`: the steady session is made once a first run is done, or someone waits for it; `now`: at once,
so that the first run shares the processor with it."""


def load_progressive(
    bundle: str | os.PathLike[str],
    *,
    target: str | None = None,
    device_id: int | None = None,
    digests: DigestPolicy = "changed",
    check: CheckPolicy = "none",
    timeout_s: float | None = None,
    require_signature: str | os.PathLike[str] | None = None,
    steady_after: BuildStart = "first_run",
    precision: str = "fastest-within-gate",
    session_options: SessionOptions | None = None,
) -> ProgressiveSession:
    """Opens a bundle as `load` does, on the variant's first phase; its steady session follows by itself.

    The steady session is made by a thread and takes over between two runs. Where the variant records no first
    phase, it is made at once. If it cannot be made, the first stays in service, and why is logged at WARNING.

    Args:
        bundle: As for `load`.
        target: As for `load`.
        device_id: As for `load`, of both sessions.
        digests: As for `load`; the files must still be the same once the steady session is made.
        check: `golden` checks the first session before it is returned, the steady one before it takes over.
        timeout_s: Seconds after which the load of the first session is given up. The steady one may take as
            long as it needs.
        require_signature: As for `load`.
        steady_after: When the steady session begins to be made: after the `first_run`, so that it takes
            nothing from it, or `now`. `wait_steady` has it made in any case.
        precision: As for `load`.
        session_options: As for `load`, of both sessions.

    Raises:
        PipelineError: As `load` does.
    """
    check_choice("steady_after", steady_after, ("first_run", "now"))
    opened = open_bundle(
        bundle,
        target=target,
        device_id=device_id,
        digests=digests,
        check=check,
        timeout_s=timeout_s,
        require_signature=require_signature,
        plan="first",
        precision=precision,
        session_options=session_options,
    )
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
