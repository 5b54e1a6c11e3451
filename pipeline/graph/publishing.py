"""`doit publish`: what a spec's `publish` section says, done with the bundle that `prepare` made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.graph.execution import Task
from pipeline.registry.catalogue import open_catalogue
from pipeline.registry.promotion import Gate, promote
from pipeline.registry.publishing import Note, publish
from pipeline.registry.references import Reference
from pipeline.registry.signatures import PATH_OPTIONS, Method, parse_signer, parse_verifier
from pipeline.spec.models import ModelSpec, Publish


def publish_model(task: Task, say: Callable[[str], None]) -> None:
    """Publishes a model's bundle as its spec says.

    Args:
        task: The model's last task, which is done.
        say: Told what came of it.

    Raises:
        PipelineError: What `publish` and `promote` of `pipeline.registry` raise.
    """
    spec = task.plan.spec
    wanted = spec.publish
    assert wanted is not None
    with open_catalogue(_registry_of(spec, wanted)) as catalogue:
        published = publish(
            task.folder,
            catalogue,
            note=Note(wanted.label),
            signer=None if wanted.sign is None else _located(parse_signer(wanted.sign), spec.folder),
            verifier=None
            if wanted.require_signature is None
            else _located(parse_verifier(wanted.require_signature), spec.folder),
        )
        version = published.version
        sent = (
            f"{published.uploaded_bytes / 2**20:.1f} MB uploaded" if published.uploaded_bytes else "as it was"
        )
        say(f"{spec.name}@{', '.join(version.labels)}: {version.digest}, {sent}")
        if wanted.alias is not None:
            reference = Reference(spec.name, version.digest)
            promote(reference, wanted.alias, catalogue, gate=Gate(wanted.max_regression))
            say(f"{spec.name}@{wanted.alias}: {version.digest}")


def _registry_of(spec: ModelSpec, wanted: Publish) -> str:
    return wanted.registry if "://" in wanted.registry else str(spec.folder / wanted.registry)


def _located(method: Method, folder: Path) -> Method:
    """Returns the method with its files relative to the spec."""

    def locate(value: Any) -> Any:
        return [str(folder / one) for one in value] if isinstance(value, list) else str(folder / value)

    options = {
        name: locate(value) if name in PATH_OPTIONS else value for name, value in method.options.items()
    }
    return Method(method.kind, options)
