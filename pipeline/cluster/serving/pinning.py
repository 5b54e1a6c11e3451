"""An alias becomes the version that it names now, so that every node of a cluster serves the same."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.runtime.loading.sources import locate


def pin_bundle(
    bundle: str | os.PathLike[str], *, require_signature: str | os.PathLike[str] | None = None
) -> str:
    """Returns what names the same bundle on every node, now and later.

    A folder stays as it is, made absolute: it has to be there on every node. A reference to a registry
    becomes one to the digest of the version that it names now, in a registry that is named in full, so that
    nodes need not have `$ORTPREP_REGISTRY`. Records alone are read for that, no weights.

    Args:
        bundle: As `pipeline.runtime.load` takes it.
        require_signature: As `load` takes it.

    Raises:
        LoadError: `bundle` names no path.
        RegistryError: The registry has no such version, or failed.
        SignatureError: The version is not signed as is required.
        MissingExtraError: Registries need packages that are not installed.
    """
    if not isinstance(bundle, str) or "://" not in bundle:
        return os.path.realpath(locate(bundle))
    import_registry()
    from pipeline.registry.cache import Cache
    from pipeline.registry.catalogue import open_catalogue
    from pipeline.registry.choosing import Wanted
    from pipeline.registry.progress import ignore
    from pipeline.registry.references import split_location
    from pipeline.registry.resolving import resolve_online_or_last
    from pipeline.registry.signatures import parse_verifier

    url, reference = split_location(bundle)
    method = None if require_signature is None else parse_verifier(os.fspath(require_signature))
    with open_catalogue(url, cache=Cache()) as catalogue:
        _, version = resolve_online_or_last(Wanted(reference, verifier=method), catalogue, ignore)
    return f"{_name_in_full(url)}/{reference.name}@{version.digest}"


def _name_in_full(url: str) -> str:
    return url.rstrip("/") if "://" in url else Path(url).expanduser().absolute().as_uri()


def import_registry() -> None:
    """Brings in what registries need.

    Raises:
        MissingExtraError: It is not installed.
    """
    from pipeline.errors import MissingExtraError

    try:
        import filelock
        import fsspec
    except ImportError as error:
        raise MissingExtraError(
            f"registries are not installed\n  {error}", hint="pip install 'ortprep[registry]'"
        ) from error
    del filelock, fsspec
