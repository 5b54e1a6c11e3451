"""GPUs that a library has code for: machine code, or PTX that the driver compiles at the first load.

The section `.nv_fatbin` is a row of containers, each with one image per architecture and kind; of hundreds
of megabytes only their headers are read. NVIDIA does not document the layout. The fields used here are those
that the wheels of 1.23.2 (CUDA 12), 1.27.0 and 1.31.1 (CUDA 13) have in common; what looks otherwise is left
alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ortprep.doctor.environment.facts.elf import read_at, read_sections
from ortprep.doctor.environment.facts.records import Architecture, DeviceCode

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
            offset, size_bytes = read_sections(file).get(_SECTION, (0, 0))
            images = frozenset(_read_images(file, offset, offset + size_bytes))
    except OSError:
        return None
    if not images:
        return None
    native, portable = (
        tuple(sorted(architecture for kind, architecture in images if kind == wanted))
        for wanted in (_MACHINE_CODE, _PTX)
    )
    return DeviceCode(str(path), native, portable)


def _read_images(file: BinaryIO, at: int, end: int) -> Iterator[tuple[int, Architecture]]:
    while container := _read_header(file, _CONTAINER, at, end):
        magic, _version, header_bytes, images_bytes = container
        if magic == 0:  # between containers
            at += _PADDING
            continue
        if magic != _MAGIC:
            return
        image_at = at + max(header_bytes, _CONTAINER.size)
        at = image_at + images_bytes
        while image := _read_header(file, _IMAGE, image_at, min(at, end)):
            kind, _version, header_bytes, image_bytes, number, flags = image
            yield kind, Architecture(number // 10, number % 10, bool(flags & _SPECIFIC))
            image_at += max(header_bytes, _IMAGE.size) + image_bytes


def _read_header(file: BinaryIO, layout: struct.Struct, at: int, end: int) -> tuple[Any, ...] | None:
    if at + layout.size > end:
        return None
    header = read_at(file, at, layout.size)
    return layout.unpack(header) if len(header) == layout.size else None


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
