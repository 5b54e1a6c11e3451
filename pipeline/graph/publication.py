"""`doit publish`: what a spec's `publish` section says, done with the bundle that `prepare` made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ortprep.graph.execution import Task
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.promotion import PromotionGate, promote
from ortprep.registry.publish import publish
from ortprep.registry.references import VersionRef
from ortprep.registry.signature_methods import (
    PATH_OPTIONS,
    SignatureMethod,
    parse_signer,
    parse_verifier,
)


def publish_model(task: Task, say: Callable[[str], None]) -> None:
    """Publishes a model's bundle as its spec says.

    Raises:
        PipelineError: What `publish` and `promote` of `ortprep.registry` raise.
    """
    spec = task.plan.spec
    publish_spec = spec.publish
    assert publish_spec is not None
    signer = None if publish_spec.sign is None else _located(parse_signer(publish_spec.sign), spec.folder)
    required = publish_spec.require_signature
    verifier = None if required is None else _located(parse_verifier(required), spec.folder)
    registry = (
        publish_spec.registry if "://" in publish_spec.registry else str(spec.folder / publish_spec.registry)
    )
    with open_catalogue(registry) as catalogue:
        published = publish(
            task.folder, catalogue, label=publish_spec.label, signer=signer, verifier=verifier
        )
        version = published.version
        sent = (
            f"{published.uploaded_bytes / 2**20:.1f} MB uploaded" if published.uploaded_bytes else "unchanged"
        )
        say(f"{spec.name}@{version.label}: {version.digest}, {sent}")
        if publish_spec.alias is not None:
            reference = VersionRef(spec.name, version.digest)
            gate = PromotionGate(publish_spec.max_regression, verifier=verifier)
            promote(reference, publish_spec.alias, catalogue, gate=gate, signer=signer)
            say(f"{spec.name}@{publish_spec.alias}: {version.digest}")


def _located(method: SignatureMethod, folder: Path) -> SignatureMethod:
    """Returns the method with its files relative to the spec."""

    def locate(value: Any) -> Any:
        return [str(folder / path) for path in value] if isinstance(value, list) else str(folder / value)

    options = {
        name: locate(value) if name in PATH_OPTIONS else value for name, value in method.options.items()
    }
    return replace(method, options=options)
