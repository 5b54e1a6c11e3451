"""`doit publish`: what a spec's `publish` section says, done with the bundle that `prepare` made."""

from __future__ import annotations

from collections.abc import Callable

from ortprep.graph.execution import Task
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.promotion import PromotionGate, promote
from ortprep.registry.publish import publish
from ortprep.registry.references import VersionRef


def publish_model(task: Task, say: Callable[[str], None]) -> None:
    """Publishes a model's bundle as its spec says.

    Raises:
        PipelineError: What `publish` and `promote` of `ortprep.registry` raise.
    """
    spec = task.plan.spec
    publish_spec = spec.publish
    assert publish_spec is not None
    private_key, public_key = (
        None if file is None else spec.folder / file
        for file in (publish_spec.sign, publish_spec.require_signature)
    )
    registry = (
        publish_spec.registry if "://" in publish_spec.registry else str(spec.folder / publish_spec.registry)
    )
    with open_catalogue(registry) as catalogue:
        published = publish(
            task.folder, catalogue, label=publish_spec.label, private_key=private_key, public_key=public_key
        )
        version = published.version
        sent = (
            f"{published.uploaded_bytes / 2**20:.1f} MB uploaded" if published.uploaded_bytes else "unchanged"
        )
        say(f"{spec.name}@{version.label}: {version.digest}, {sent}")
        if publish_spec.alias is not None:
            reference = VersionRef(spec.name, version.digest)
            gate = PromotionGate(publish_spec.max_regression, public_key=public_key)
            promote(reference, publish_spec.alias, catalogue, gate=gate)
            say(f"{spec.name}@{publish_spec.alias}: {version.digest}")
