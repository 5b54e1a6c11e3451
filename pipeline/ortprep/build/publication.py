"""`doit publish`: what a spec's `publish` section says, done with the bundle that `prepare` made."""

from __future__ import annotations

import os
from collections.abc import Callable
from urllib.parse import urlsplit

from ortprep.build.execution import Task
from ortprep.errors import AccessDeniedError
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.promotion import PromotionGate, promote
from ortprep.registry.publish import publish
from ortprep.registry.references import REGISTRY_VARIABLE, VersionRef
from ortprep.spec.redaction import redact_url

_MLFLOW = "mlflow"


def publish_model(task: Task, say: Callable[[str], None]) -> None:
    """Publishes a model's bundle as its spec says.

    Raises:
        AccessDeniedError: The registry is an MLflow server that nobody but the spec names.
        PipelineError: The registry cannot be reached, or refuses the bundle.
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
    _check_server(registry)
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


def _check_server(registry: str) -> None:
    """Refuses an MLflow server that only a spec names: MLflow's client sends its login to any server.

    Raises:
        AccessDeniedError: It is neither that of `$MLFLOW_TRACKING_URI` nor that of `$ORTPREP_REGISTRY`.
    """
    if not registry.lower().startswith(_MLFLOW) or registry == f"{_MLFLOW}://":
        return
    named = os.environ.get("MLFLOW_TRACKING_URI", ""), os.environ.get(REGISTRY_VARIABLE, "").partition("+")[2]
    server = registry.partition("+")[2]
    if _host(server) not in {_host(url) for url in named if url}:
        raise AccessDeniedError(
            f"an MLflow server that only the spec names: {redact_url(server)}\n"
            f"  expected that of $MLFLOW_TRACKING_URI or ${REGISTRY_VARIABLE}, which gets your login",
            hint="export MLFLOW_TRACKING_URI=https://HOST:PORT   (if you know the server)",
        )


def _host(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()
