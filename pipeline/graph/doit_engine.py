"""The engine that everyone has: doit, on this machine."""

from __future__ import annotations

from pipeline.graph.build import plan_builds
from pipeline.graph.doit_tasks import run_doit
from pipeline.graph.engine import Order, Outcome
from pipeline.graph.observer import Observer


class DoitEngine:
    """doit, on this machine."""

    def prepare(self, order: Order, observer: Observer) -> Outcome:
        """Builds what is not up to date; raises as `Engine.prepare` does."""
        builds = plan_builds(
            order.configs,
            order.artifacts,
            names=order.names,
            only=order.only,
            skip_unavailable=order.skip_unavailable,
        )
        code, errors = run_doit(builds, observer, jobs=order.jobs)
        return Outcome(code == 0, errors)
