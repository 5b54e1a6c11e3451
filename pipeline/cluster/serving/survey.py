"""What a node says of the bundles and of itself, once it has pulled them: a task that runs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.bundle.codec import decode, encode
from pipeline.bundle.loader_config import LoaderConfig, read_loader_config
from pipeline.bundle.manifest import MANIFEST_FILE, read_manifest
from pipeline.errors import PipelineError, error_named
from pipeline.runtime.hardware import read_hardware
from pipeline.runtime.loading.sources import locate
from pipeline.runtime.pool.loads import read_load
from pipeline.runtime.pool.placement import ModelLoad
from pipeline.runtime.pool.worker import describe_error

KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Errand:
    """What a node is asked.

    Attributes:
        bundles: Folders, or references to a registry, by the name that the pool calls their models by; "" for
            a model's own.
        copies: Processes of a device that have a model.
        precision: As `load` takes it; so is `require_signature`.
        buckets: Whether they have its buckets too.
    """

    bundles: Mapping[str, str]
    copies: int = 1
    precision: str = "fastest-within-gate"
    buckets: bool = True
    require_signature: str | None = None


@dataclass(frozen=True)
class SurveyedModel:
    """A model as a node has it.

    Attributes:
        name: What the pool calls it.
        root: The bundle's folder there.
        config: What `loader.json` says there; a node pulls the variants it can run, so nodes may differ.
        identity: The reference that was asked for, which is pinned to a version's digest; of a folder, the
            digests of its golden sample and of the model that it was prepared from.
        loads: What it asks for on a device of each of `KINDS`, in their order.
    """

    name: str
    root: str
    config: LoaderConfig
    identity: str
    loads: tuple[ModelLoad, ...]


@dataclass(frozen=True)
class Survey:
    """What a node has.

    Attributes:
        models: The models, in the order they were asked for.
        memory_bytes: Memory of the machine; None if unknown.
        gpu_memory_bytes: Memory of its first GPU; None without one.
    """

    models: tuple[SurveyedModel, ...]
    memory_bytes: int | None
    gpu_memory_bytes: int | None

    def loads(self, kind: str) -> tuple[ModelLoad, ...]:
        """Returns what the models ask for on a kind of device."""
        return tuple(model.loads[KINDS.index(kind)] for model in self.models)

    def memory_of(self, kind: str) -> int | None:
        """Returns what a device of a kind has."""
        return self.memory_bytes if kind == "cpu" else self.gpu_memory_bytes


def survey_node(errand: Mapping[str, Any]) -> dict[str, Any]:
    """Runs on a node: pulls the bundles, unless they are there, and returns what they are.

    Args:
        errand: An `Errand` as JSON types.

    Returns:
        A `Survey` as JSON types; or `kind`, `message` and `hint` of what went wrong.
    """
    try:
        return dict(encode(_survey(decode(Errand, errand))))
    except PipelineError as error:
        return describe_error(error)


def _survey(errand: Errand) -> Survey:
    hardware = read_hardware()
    models = [_survey_model(name, bundle, errand) for name, bundle in errand.bundles.items()]
    gpus: Sequence[Any] = hardware.gpus
    return Survey(tuple(models), hardware.memory_bytes, gpus[0].memory_bytes if gpus else None)


def _survey_model(name: str, bundle: str, errand: Errand) -> SurveyedModel:
    path = Path(locate(bundle, require_signature=errand.require_signature))
    config = read_loader_config(path)
    name = name or config.name
    loads = tuple(
        read_load(
            name,
            path,
            kind,
            copies=errand.copies,
            precision=errand.precision,
            buckets=errand.buckets,
        )
        for kind in KINDS
    )
    return SurveyedModel(name, str(path), config, _identify(bundle, path, config), loads)


def _identify(bundle: str, path: Path, config: LoaderConfig) -> str:
    if "://" in bundle:
        return bundle
    has_manifest = (path / MANIFEST_FILE).exists()
    source = read_manifest(path).source.sha256 if has_manifest else "unknown"
    return f"golden {config.golden.file.sha256}, source {source}"


def read_survey(said: Mapping[str, Any], node: str) -> Survey:
    """Returns what a node said.

    Args:
        said: As `survey_node` returns it.
        node: The node's name, for errors.

    Raises:
        PipelineError: What went wrong there, with the node's name in front.
    """
    raise_what_went_wrong(said, node)
    return decode(Survey, said)


def raise_what_went_wrong(said: Mapping[str, Any], where: str) -> None:
    """Raises the error that came as JSON types, if one did, with the name of where it came from.

    Raises:
        PipelineError: Of the class that it had there.
    """
    if "message" in said and "kind" in said:
        raise error_named(str(said["kind"]))(f"{where}: {said['message']}", hint=said.get("hint"))
