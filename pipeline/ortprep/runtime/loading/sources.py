"""Where a bundle is: a folder, or in a registry, from which it is pulled first.

A runtime job that loads from folders needs neither registries nor what they need. Who handles references is
therefore looked up by name among the installed packages' entry points, in the group `ortprep.sources`; the
extra `registry` brings one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.errors import LoadError, MissingExtraError
from ortprep.versions import install_command

if TYPE_CHECKING:
    from ortprep.bundle.file_memory import StrPath
    from ortprep.bundle.loader_config import FileEntry

_GROUP, _NAME = "ortprep.sources", "registry"


def locate(
    bundle: str | os.PathLike[str], *, require_signature: str | os.PathLike[str] | None = None
) -> Path:
    """Returns the folder of a bundle, pulled into the local cache if it is in a registry.

    The signature is verified, the files are not: they are hashed when a session is made of them.

    Args:
        bundle: A folder; `registry://NAME@VERSION` in the registry that `$ORTPREP_REGISTRY` names; or
            `REGISTRY/NAME@VERSION` with a registry's URL. VERSION is an alias, a label or a digest.
        require_signature: A public key's file; bundles that are not signed with it are refused.

    Raises:
        LoadError: `bundle` is not a path.
        MissingExtraError: Registries, or signatures, need packages that are not installed.
        SignatureError: The bundle is not signed as required.
        RegistryError: The registry has no such version, or failed.
        IntegrityError: The bytes are not those that were published.
    """
    path = _as_text(bundle)
    if "://" not in path and require_signature is None:
        return Path(path)
    return _open_source(path, require_signature)[0]


def read_signed_files(folder: StrPath, require_signature: StrPath) -> tuple[FileEntry, ...]:
    """Returns the records of all files of a pulled bundle, as they were signed; raises as `locate`."""
    return _open_source(str(folder), require_signature)[1] or ()


def _open_source(
    path: str, require_signature: str | os.PathLike[str] | None
) -> tuple[Path, tuple[FileEntry, ...] | None]:
    """Returns a bundle's folder, and the records of its files if a signature covers them, else None."""
    from importlib import metadata

    try:
        open_source = next(iter(metadata.entry_points(group=_GROUP, name=_NAME))).load()
    except (StopIteration, ModuleNotFoundError) as error:
        raise MissingExtraError(
            "registry support is not installed\n  expected it for bundles in a registry and for signatures",
            hint=install_command("registry"),
        ) from error
    required = None if require_signature is None else os.fspath(require_signature)
    located: tuple[Path, tuple[FileEntry, ...] | None] = open_source(path, require_signature=required)
    return located


def _as_text(bundle: object) -> str:
    """Returns the path of a bundle as text; raises `LoadError` if it is none."""
    named = bundle if isinstance(bundle, str | os.PathLike) else None
    path = None if named is None else os.fspath(named)
    if not isinstance(path, str) or "\0" in path:
        raise LoadError(
            f"not a bundle path: {bundle!r}\n  expected text or a pathlib.Path, without NUL",
            hint='load("artifacts/NAME")',
        )
    return path
