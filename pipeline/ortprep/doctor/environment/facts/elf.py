"""Sections of a shared library, and the libraries it links to. Reads only the tables it needs."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")
_IDENTITY = b"\x7fELF\x02\x01"  # 64 bits, little endian: every machine ONNX Runtime has a Linux wheel for
_NEEDED, _END = 1, 0
_MAX_BYTES = 16 * 1024 * 1024
"""Largest table that is read whole; those of the CUDA provider take kilobytes."""


def read_sections(file: BinaryIO) -> dict[str, tuple[int, int]]:
    """Returns offset and bytes of an ELF file's sections, by name; none of another or a truncated file."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_IDENTITY):
        return {}
    *_, offset, _flags, _ehsize, _phentsize, _phnum, entry_bytes, count, names_index = _HEADER.unpack(header)
    if entry_bytes != _SECTION.size:
        return {}
    entries = list(_unpack_all(_SECTION, read_at(file, offset, count * entry_bytes)))
    if names_index >= len(entries):
        return {}
    names = read_at(file, entries[names_index][4], entries[names_index][5])
    return {_text_at(names, entry[0]): (entry[4], entry[5]) for entry in entries}


def read_needed(path: Path) -> tuple[str, ...]:
    """Returns the libraries that a shared library links to, in its order.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        sections = read_sections(file)
        if not {".dynamic", ".dynstr"} <= sections.keys():
            return ()
        dynamic, names = (read_at(file, *sections[name]) for name in (".dynamic", ".dynstr"))
    entries = itertools.takewhile(lambda entry: entry[0] != _END, _unpack_all(_DYNAMIC, dynamic))
    return tuple(_text_at(names, value) for tag, value in entries if tag == _NEEDED)


def read_at(file: BinaryIO, offset: int, size_bytes: int) -> bytes:
    """Returns up to 16 MiB of a file from an offset on; fewer bytes at its end."""
    file.seek(min(offset, 2**62))
    return file.read(min(size_bytes, _MAX_BYTES))


def _unpack_all(layout: struct.Struct, table: bytes) -> Iterator[tuple[Any, ...]]:
    return layout.iter_unpack(table[: len(table) - len(table) % layout.size])


def _text_at(table: bytes, offset: int) -> str:
    return table[offset:].partition(b"\0")[0].decode(errors="replace")
