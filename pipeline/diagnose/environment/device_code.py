"""For which GPUs a library has code: machine code, or PTX that the driver compiles at the first load.

The section `.nv_fatbin` is a row of containers, each with one image per architecture and kind; of hundreds
of megabytes only their headers are read. NVIDIA does not document the layout. The fields used here are those
that the wheels of 1.23.2 (CUDA 12), 1.27.0 and 1.31.1 (CUDA 13) have in common; what looks otherwise is left
alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.diagnose.environment.elf import Section, read_sections
from pipeline.diagnose.environment.facts import Architecture, DeviceCode

_SECTION = ".nv_fatbin"
_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the images
_IMAGE = struct.Struct("<HHIQ12xI8xQ")  # kind, version, bytes of this header and of the image, arch, flags
_PTX, _MACHINE_CODE = 1, 2
_SPECIFIC = 0x100000
"""Flag of images for `sm_90a` and its like, as those of ONNX Runtime's wheels carry it for 9.0 and 12.0."""

_PADDING = 8


def read_device_code(path: Path) -> DeviceCode | None:
    """Returns the architectures a library has code for, None if it has no device code or cannot be read."""
    try:
        with path.open("rb") as file:
            section = read_sections(file).get(_SECTION)
            images = frozenset() if section is None else frozenset(_read_images(file, section))
    except OSError:
        return None
    if not images:
        return None
    return DeviceCode(
        file=str(path),
        native=tuple(sorted(architecture for kind, architecture in images if kind == _MACHINE_CODE)),
        portable=tuple(sorted(architecture for kind, architecture in images if kind == _PTX)),
    )


def _read_images(file: BinaryIO, section: Section) -> Iterator[tuple[int, Architecture]]:
    at, end = section.offset, section.offset + section.size_bytes
    while at + _CONTAINER.size <= end:
        file.seek(at)
        head = file.read(_CONTAINER.size)
        if len(head) < _CONTAINER.size:
            return
        magic, _version, head_bytes, images_bytes = _CONTAINER.unpack(head)
        if magic == 0:  # between containers
            at += _PADDING
            continue
        if magic != _MAGIC:
            return
        first = at + max(head_bytes, _CONTAINER.size)
        at = first + images_bytes
        yield from _read_container(file, first, min(at, end))


def _read_container(file: BinaryIO, at: int, end: int) -> Iterator[tuple[int, Architecture]]:
    while at + _IMAGE.size <= end:
        file.seek(at)
        head = file.read(_IMAGE.size)
        if len(head) < _IMAGE.size:
            return
        kind, _version, head_bytes, image_bytes, number, flags = _IMAGE.unpack(head)
        major, minor = divmod(number, 10)
        yield kind, Architecture(major, minor, bool(flags & _SPECIFIC))
        at += max(head_bytes, _IMAGE.size) + image_bytes


def runs_natively(code: DeviceCode, compute_capability: tuple[int, int]) -> bool:
    """Returns whether a library has machine code that a GPU runs.

    Code for 8.0 runs on 8.6: compatible upwards within a major number, unless it is specific
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#binary-compatibility).
    """
    major, minor = compute_capability
    return any(
        there.major == major and (there.minor == minor if there.specific else there.minor <= minor)
        for there in code.native
    )


def compiles_at_start(code: DeviceCode, compute_capability: tuple[int, int]) -> bool:
    """Returns whether a library has PTX that the driver can compile for a GPU."""
    return any(
        (there.major, there.minor) == compute_capability
        if there.specific
        else (there.major, there.minor) <= compute_capability
        for there in code.portable
    )


def name_architecture(architecture: Architecture) -> str:
    """Returns an architecture as NVIDIA writes compute capabilities: `9.0a`."""
    return f"{architecture.major}.{architecture.minor}{'a' if architecture.specific else ''}"
