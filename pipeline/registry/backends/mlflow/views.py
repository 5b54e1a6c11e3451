"""Versions and aliases in MLflow's model registry, as its other users look for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.bundle.digest import PREFIX
from pipeline.errors import NotPublishedError, RegistryError, RegistryUnavailableError
from pipeline.registry.backends.mlflow.runs import TAG_PART, Run, Tracking
from pipeline.registry.state import Alias, State, Version

log = logging.getLogger(__name__)

TAG_VERSION, TAG_LABELS, TAG_PARTS, TAG_TARGETS = (
    "ortprep.version",
    "ortprep.labels",
    "ortprep.parts",
    "ortprep.targets",
)
BUNDLE = "bundle"

_TAG_ALIAS = "ortprep.alias."
_MOST_VERSIONS = 100_000
_PAGE = 200


class View:
    """One registered model.

    Args:
        tracking: The server.
        state: What the model's records mean.
        is_recorded: Says whether there is a record of a version after all; asked before a version is removed,
            because somebody may have published it since `state` was read.
    """

    def __init__(
        self,
        tracking: Tracking,
        state: State,
        *,
        is_recorded: Callable[[str], bool],
    ) -> None:
        self._tracking = tracking
        self._state = state
        self._parts = state.parts
        self._is_recorded = is_recorded

    def update(self) -> None:
        """Makes the registered model show the state.

        Raises:
            RegistryError: The server refused, or is not available.
        """
        if not self._state.versions and self._find_model() is None:
            return
        self._make_model()
        present = self._list_versions()
        for digest, version in self._state.versions.items():
            if digest not in present:
                self._make_version(version)
        # Listed again: two that do this at once may each have made one.
        present = self._list_versions()
        for digest, duplicates in present.items():
            self._remove(duplicates[1:])
            if digest in self._state.versions:
                self._set_tags(duplicates[0], self._state.versions[digest])
            elif not self._is_recorded(digest):
                self._remove(duplicates[:1])
        self._set_aliases({digest: str(found[0].version) for digest, found in present.items()})

    @property
    def _name(self) -> str:
        return self._state.model

    def _find_model(self) -> Any:
        try:
            with self._tracking.asking(f"find registered model: {self._name}") as client:
                return client.get_registered_model(self._name)
        except NotPublishedError:
            return None

    def _make_model(self) -> None:
        if self._find_model() is not None:
            return
        try:
            with self._tracking.asking(f"create registered model: {self._name}") as client:
                client.create_registered_model(
                    self._name,
                    tags={"ortprep": "1"},
                    description="ONNX Runtime bundles published by ortprep; `ortprep promote` moves aliases.",
                )
        except RegistryUnavailableError:
            raise
        except RegistryError:
            # Another publisher may have been the first.
            if self._find_model() is None:
                raise

    def _list_versions(self) -> dict[str, list[Any]]:
        """Returns the registered versions of ours by digest, the lowest number first."""
        found: list[Any] = []
        token: str | None = None
        with self._tracking.asking(f"list registered versions: {self._name}") as client:
            while len(found) <= _MOST_VERSIONS:
                page = client.search_model_versions(
                    f"name='{self._name}'", max_results=_PAGE, page_token=token
                )
                found += page
                token = page.token
                if not token:
                    break
        ours: dict[str, list[Any]] = {}
        for version in sorted(found, key=lambda version: int(version.version)):
            if TAG_VERSION in version.tags:
                ours.setdefault(version.tags[TAG_VERSION], []).append(version)
        return ours

    def _make_version(self, version: Version) -> None:
        run = self._find_run(version)
        if run is None:
            log.warning("no run in MLflow for version %s of %s: not registered", version.digest, self._name)
            return
        with self._tracking.asking(f"register version: {version.digest} of {self._name}") as client:
            client.create_model_version(
                self._name,
                f"{run.artifact_uri}/{BUNDLE}",
                run.run_id,
                tags=self._tags(version),
                description=self._describe(version),
                await_creation_for=0,
            )

    def _find_run(self, version: Version) -> Run | None:
        newest = max(version.record.parts, key=lambda part: (self._parts[part].created_at, part))
        runs = self._tracking.find_runs(self._name, TAG_PART, newest)
        return runs[0] if runs else None

    def _targets(self, version: Version) -> list[str]:
        parts = [self._parts[part] for part in version.record.parts]
        return sorted({variant.target for part in parts for variant in part.variants})

    def _tags(self, version: Version) -> dict[str, str]:
        return {
            TAG_VERSION: version.digest,
            TAG_LABELS: ", ".join(version.labels),
            TAG_PARTS: ", ".join(version.record.parts),
            TAG_TARGETS: ", ".join(self._targets(version)),
            "ortprep.superseded_by": version.superseded_by,
        }

    def _describe(self, version: Version) -> str:
        parts = [self._parts[part] for part in version.record.parts]
        lines = [
            f"Version {version.digest.removeprefix(PREFIX)[:12]} for {', '.join(self._targets(version))}, "
            f"prepared at {version.created_at}."
        ]
        for part in parts:
            for one in part.variants:
                where = f" on {one.hardware}" if one.hardware else ""
                lines.append(f"- {one.name}: {one.target}, ONNX Runtime {one.onnxruntime}{where}")
        return "\n".join(lines)[:5000]

    def _set_tags(self, registered: Any, version: Version) -> None:
        for name, value in self._tags(version).items():
            if registered.tags.get(name, "") != value:
                with self._tracking.asking(f"tag version: {version.digest} of {self._name}") as client:
                    client.set_model_version_tag(self._name, registered.version, name, value)

    def _remove(self, versions: list[Any]) -> None:
        for version in versions:
            try:
                with self._tracking.asking(f"remove version: {version.version} of {self._name}") as client:
                    client.delete_model_version(self._name, version.version)
            except NotPublishedError:
                continue

    def _set_aliases(self, numbers: Mapping[str, str]) -> None:
        model = self._find_model()
        if model is None:
            return
        digests = {number: digest for digest, number in numbers.items()}
        for alias in self._state.aliases.values():
            wanted, native = numbers.get(alias.version), model.aliases.get(alias.name)
            native = None if native is None else str(native)
            if wanted is None or wanted == native:
                continue
            left_at = model.tags.get(_TAG_ALIAS + alias.name)
            if native is not None and digests.get(native) != left_at:
                log.warning(
                    "alias %s of %s was moved in MLflow by somebody else, to version %s: moved back to %s",
                    alias.name,
                    self._name,
                    native,
                    wanted,
                )
            self._set_alias(alias, wanted)

    def _set_alias(self, alias: Alias, number: str) -> None:
        try:
            with self._tracking.asking(f"set alias: {alias.name} of {self._name}") as client:
                client.set_registered_model_alias(self._name, alias.name, number)
                client.set_registered_model_tag(self._name, _TAG_ALIAS + alias.name, alias.version)
        except RegistryUnavailableError:
            raise
        except RegistryError as error:
            # MLflow keeps `latest` and `v1`, and takes no dots; the records have the alias all the same.
            log.warning("alias %s of %s is not shown in MLflow: %s", alias.name, self._name, error.message)
