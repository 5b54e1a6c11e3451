"""Codes that only this user's processes can compute, by a key in the cache folder."""

from __future__ import annotations

import hmac
import os
from typing import Any

from ortprep.bundle.codec import canonical_json
from ortprep.bundle.file_lock import FileLock
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
        with FileLock(path) as lock:
            lock.acquire()  # of two processes that make it, one waits for the other
            key = os.pread(lock.descriptor, _KEY_BYTES, 0)
            if len(key) != _KEY_BYTES:
                key = os.urandom(_KEY_BYTES)
                os.pwrite(lock.descriptor, key, 0)
            return key
    except OSError:  # a read-only disk
        return _PROCESS_KEY
