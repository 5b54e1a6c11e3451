"""Codes that only this user's processes can compute, by a key in the cache folder."""

from __future__ import annotations

import fcntl
import hmac
import os
from typing import Any

from ortprep.bundle.codec import canonical_json
from ortprep.bundle.file_memory import cache_folder, read_entry

_KEY_BYTES = 32
_PROCESS_KEY = os.urandom(_KEY_BYTES)
"""Key of a process without a cache folder: its codes count for no other process."""


def authenticate(data: Any) -> str:
    """Returns the code of JSON data, in hexadecimal: an HMAC, which tells nobody else what the data is."""
    return hmac.digest(_read_key(), canonical_json(data), "sha256").hex()


def _read_key() -> bytes:
    """Returns this user's key, which is made if there is none; without a cache folder, the process's."""
    folder = cache_folder("receipts")
    if folder is None:
        return _PROCESS_KEY
    path = f"{folder}/key"
    key = read_entry(path, max_bytes=_KEY_BYTES)
    if key is not None and len(key) == _KEY_BYTES:
        return key
    try:
        with open(path, "a+b", opener=_open_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # of two processes that make it, one waits for the other
            file.seek(0)
            key = file.read()
            if len(key) != _KEY_BYTES:
                file.truncate(0)
                key = os.urandom(_KEY_BYTES)
                file.write(key)
            return key
    except OSError:  # a read-only disk
        return _PROCESS_KEY


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
