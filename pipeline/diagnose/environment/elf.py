"""Of a shared library: its sections, and the libraries it links to. Reads what it needs and no more."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")
_IDENTITY = b"\x7fELF\x02\x01"  # 64 bits, little endian: every machine ONNX Runtime has a Linux wheel for
_NEEDED, _END = 1, 0
_MOST_BYTES = 16 * 1024 * 1024
"""Largest table that is read whole; those of the CUDA provider take kilobytes."""


@dataclass(frozen=True)
class Section:
    """A section of an ELF file.

    Attributes:
        name: `.dynstr`.
        offset: Where it begins in the file.
        size_bytes: Its length.
    """

    name: str
    offset: int
    size_bytes: int


def read_sections(file: BinaryIO) -> dict[str, Section]:
    """Returns the sections of an ELF file by name; none of a file that is something else or is cut short."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_IDENTITY):
        return {}
    *_, offset, _flags, _ehsize, _phentsize, _phnum, entry_bytes, count, names_index = _HEADER.unpack(header)
    if entry_bytes != _SECTION.size:
        return {}
    table = _read_at(file, offset, count * entry_bytes)
    entries = [_SECTION.unpack_from(table, at) for at in range(0, len(table) - entry_bytes + 1, entry_bytes)]
    if names_index >= len(entries):
        return {}
    names = _read_at(file, entries[names_index][4], entries[names_index][5])
    sections = (Section(_text_at(names, entry[0]), entry[4], entry[5]) for entry in entries)
    return {section.name: section for section in sections}


def read_needed(path: Path) -> tuple[str, ...]:
    """Returns the libraries that a shared library links to, in its order.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        sections = read_sections(file)
        if ".dynamic" not in sections or ".dynstr" not in sections:
            return ()
        dynamic = _read_section(file, sections[".dynamic"])
        names = _read_section(file, sections[".dynstr"])
    return tuple(_text_at(names, value) for tag, value in _entries(dynamic) if tag == _NEEDED)


def _entries(dynamic: bytes) -> Iterator[tuple[int, int]]:
    whole = len(dynamic) - len(dynamic) % _DYNAMIC.size
    for tag, value in _DYNAMIC.iter_unpack(dynamic[:whole]):
        if tag == _END:
            return
        yield tag, value


def _read_section(file: BinaryIO, section: Section) -> bytes:
    return _read_at(file, section.offset, section.size_bytes)


def _read_at(file: BinaryIO, offset: int, size_bytes: int) -> bytes:
    file.seek(min(offset, 2**62))
    return file.read(min(size_bytes, _MOST_BYTES))


def _text_at(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    return table[offset : end if end >= 0 else len(table)].decode(errors="replace")
