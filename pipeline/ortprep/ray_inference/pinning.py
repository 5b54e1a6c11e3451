"""An alias becomes the version that it names now, so that every node of a cluster serves the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.codec import encode
from ortprep.bundle.digest import digest_json
from ortprep.bundle.loader_config import read_loader_config
from ortprep.errors import IntegrityError, NotPublishedError, RegistryUnavailableError
from ortprep.ray_inference.config import ServeConfig
from ortprep.runtime.loading.sources import locate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PinnedBundle:
    """A bundle in the version that every replica serves.

    Attributes:
        bundle: A folder that every node can reach, or a reference to a registry that names a digest.
        version: Digest of the version; of a folder, that of its `loader.json`.
        alias: Reference with an alias, whose version replicas may follow; "" if none was named.
    """

    bundle: str
    version: str
    alias: str = ""


def pin_version(
    bundle: str | os.PathLike[str], *, require_signature: str | os.PathLike[str] | None = None
) -> tuple[str, PinnedBundle]:
    """Returns the name of a bundle's model, and the bundle in the version that it names now, for every node.

    A folder stays as it is, made absolute: it has to be there on every node. A reference to a registry
    becomes one to the digest of the version that it names now, in a registry that is named in full, so that
    nodes need not have `$ORTPREP_REGISTRY`. Documents alone are read for that, no weights.

    Args:
        bundle: A bundle for `ortprep.runtime.load`.
        require_signature: Key for `load`.

    Raises:
        LoadError: `bundle` names no path.
        BundleError: The folder has no bundle that can be read.
        RegistryError: The registry has no such version, or failed.
        SignatureError: The version is not signed as is required.
        MissingExtraError: Registries need packages that are not installed.
    """
    if not isinstance(bundle, str) or "://" not in bundle:
        root = Path(os.path.realpath(locate(bundle)))
        return read_loader_config(root).name, PinnedBundle(str(root), _read_version(root))
    from ortprep.registry.catalogue import open_catalogue
    from ortprep.registry.pull import PullRequest, resolve_version
    from ortprep.registry.references import split_location

    url, reference = split_location(bundle)
    public_key = None if require_signature is None else Path(require_signature)
    with open_catalogue(url) as catalogue:
        version, _ = resolve_version(PullRequest(reference, public_key=public_key), catalogue)
        place = catalogue.backend.url
    registry = place.rstrip("/") if "://" in place else Path(place).as_uri()
    model = f"{registry}/{reference.name}"
    alias = "" if reference.version in (None, version.digest) else f"{model}@{reference.version}"
    return reference.name, PinnedBundle(f"{model}@{version.digest}", version.digest, alias)


def follow_aliases(bundles: Mapping[str, PinnedBundle], config: ServeConfig) -> dict[str, PinnedBundle]:
    """Returns what the aliases of bundles, by model, name now.

    Without `watch_s`, and while a registry cannot be reached or has no such alias, a bundle stays at its
    version.
    """
    if not config.watch_s:
        return dict(bundles)
    followed = dict(bundles)
    for name, pinned in bundles.items():
        try:
            if pinned.alias:
                _, followed[name] = pin_version(pinned.alias, require_signature=config.load.require_signature)
        except (RegistryUnavailableError, NotPublishedError) as error:
            log.warning("%s stays at %s: %s", name, pinned.version, error.message)
    return followed


def require_version(pinned: PinnedBundle, root: Path) -> None:
    """Checks that the folder a bundle was opened from has the pinned version."""
    if "://" not in pinned.bundle and _read_version(root) != pinned.version:
        raise IntegrityError(
            f"bundle was replaced by another build: {root}\n"
            "  expected the version that was deployed, since answers of two versions must not mix",
            hint="deploy again",
        )


def _read_version(root: Path) -> str:
    return digest_json(encode(read_loader_config(root)))
