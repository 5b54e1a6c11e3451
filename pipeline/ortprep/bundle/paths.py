"""Names of files inside a bundle: relative, POSIX, and never able to leave it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

from ortprep.bundle.file_memory import StrPath, open_regular
from ortprep.errors import IntegrityError

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Names of models, targets and variants: one path component on every file system, no `..`, no hidden file."""

RECEIPT_FOLDER = ".registry"
"""Where a bundle that was pulled keeps where it is from; no session reads what is in it."""

RECEIPT_FILES = frozenset(f"{RECEIPT_FOLDER}/{name}" for name in ("pulled.json", "part.json"))
"""All that may be in that folder."""

MAX_NAME = 128
"""Maximum length of such a name."""

MAX_PATH_PARTS = 32
"""Maximum number of names in a path: what checks a path's folders must not take long for a hostile one."""

_PROGRAM_SUFFIXES = frozenset({
    ".bat", ".cfg", ".ini", ".mk", ".ps1", ".pth", ".py", ".pyc", ".pyd", ".sh", ".so", ".toml",
    ".yaml", ".yml",
})  # fmt: skip
"""How names of files end that programs run or obey, specs among them; weights may have any other."""

_MARKS = str.maketrans("", "", "._-")


def is_safe_name(name: str) -> bool:
    """Returns whether `name` can be a model's, a target's or a variant's."""
    is_plain = name.isascii() and name[:1].isalnum() and name.translate(_MARKS).isalnum()
    return is_plain and len(name) <= MAX_NAME and ".." not in name


def make_name(text: str) -> str:
    """Returns a safe name for any text: letters lose their accents, other characters become `-`."""
    import re  # here: a load that reads a bundle imports this module
    import unicodedata

    decomposed = unicodedata.normalize("NFKD", text)
    letters = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    name = (
        re.sub(r"\.\.+", ".", re.sub(r"[^A-Za-z0-9._-]+", "-", letters)).strip("-._")[:MAX_NAME].rstrip("-._")
    )
    return name if is_safe_name(name) else "model"


def is_safe_path(path: str) -> bool:
    """Returns whether `path` is a relative POSIX path that stays below the folder it is resolved in.

    One of more than `MAX_PATH_PARTS` names does not count as safe.
    """
    if len(path) > 1024 or "\\" in path or not path.isprintable():
        return False
    parts = path.split("/")
    return len(parts) <= MAX_PATH_PARTS and not {"", ".", ".."} & {*parts}


def is_model_path(path: str) -> bool:
    """Returns whether a bundle may have a model or weights at a path: safe, not hidden, no program's."""
    is_hidden = any(part.startswith(".") for part in path.split("/"))
    return is_safe_path(path) and not is_hidden and os.path.splitext(path)[1].lower() not in _PROGRAM_SUFFIXES


def resolve_inside(root: StrPath, path: str) -> str:
    """Returns the file `path` names inside `root`, links resolved.

    Raises:
        IntegrityError: The path is absolute, climbs out, or is a link that leads out.
    """
    if not is_safe_path(path):
        raise IntegrityError(f"path leaves its bundle: {path!r}\n  expected a relative path below {root}")
    base = os.path.realpath(root)
    full = os.path.realpath(f"{base}/{path}")
    if not _is_below(full, base):
        raise IntegrityError(f"path leaves its bundle: {path!r}\n  expected below {base}, got {full}")
    return full


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def open_inside(root: StrPath, path: str) -> BinaryIO:
    """Opens the file `path` names inside `root`, a path free of links, whatever both lead to a moment later.

    Raises:
        IntegrityError: The path leads out, also by a link that was put there just now.
        OSError: It cannot be opened, or is no regular file.
    """
    file = open_regular(resolve_inside(root, path))
    opened = os.readlink(f"/proc/self/fd/{file.fileno()}")
    if not _is_below(opened, os.fspath(root)):
        file.close()
        raise IntegrityError(f"path leaves its bundle: {path!r}\n  expected below {root}, got {opened}")
    return file


def walk_folders(
    root: StrPath, onerror: Callable[[OSError], object] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Does what `os.walk` does, which recurses, down to `MAX_PATH_PARTS` levels.

    Raises:
        IntegrityError: There are more.
    """
    for folder, folders, files in os.walk(root, onerror=onerror):
        yield folder, folders, files
        if folder.count("/") - str(root).count("/") >= MAX_PATH_PARTS:
            raise IntegrityError(
                f"folders nested too deeply: {root}\n  expected at most {MAX_PATH_PARTS} levels"
            )
