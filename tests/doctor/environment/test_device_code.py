from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.doctor.environment.facts.device_code import compiles_at_start, read_device_code, runs_natively
from ortprep.doctor.environment.facts.elf import read_needed
from ortprep.doctor.environment.facts.records import Architecture, DeviceCode
from tests.doctor.environment.builders import build_elf

PTX, MACHINE_CODE = 1, 2
SPECIFIC = 0x100000


def _image(kind: int, number: int, flags: int = 0, *, header: int = 64) -> bytes:
    payload = b"\x50\xed\x55\xba" * 2  # looks like a container, and is none
    head = struct.pack(
        "<HHIQIIHHIIIQ", kind, 0x101, header, len(payload), 0, 0, 8, 1, number, 0, 0, 0x11 | flags
    )
    return head.ljust(header, b"\0") + payload


def _container(*images: bytes) -> bytes:
    content = b"".join(images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def _read(tmp_path: Path, section: bytes) -> DeviceCode | None:
    file = tmp_path / "library.so"
    file.write_bytes(build_elf({".nv_fatbin": section}))
    return read_device_code(file)


def test_images_of_every_container_are_read_whatever_the_size_of_their_headers(tmp_path: Path) -> None:
    section = (
        _container(_image(MACHINE_CODE, 80), _image(PTX, 90, header=112))
        + bytes(8)
        + _container(_image(MACHINE_CODE, 120, SPECIFIC, header=112), _image(MACHINE_CODE, 75))
    )
    code = _read(tmp_path, section)
    assert code is not None
    assert code.native == (Architecture(7, 5), Architecture(8, 0), Architecture(12, 0, specific=True))
    assert code.portable == (Architecture(9, 0),)


def test_a_library_without_device_code_has_none(tmp_path: Path) -> None:
    assert _read(tmp_path, b"") is None


@given(noise=st.binary(max_size=400), start=st.sampled_from([b"", _container(_image(MACHINE_CODE, 80))]))
def test_no_section_makes_reading_fail(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, start: bytes
) -> None:
    code = _read(tmp_path_factory.mktemp("noise"), start + noise)
    assert not start or (code is not None and Architecture(8, 0) in code.native)


@given(cut=st.integers(0, 700))
def test_a_file_cut_short_anywhere_is_read_as_far_as_it_goes(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    file = tmp_path_factory.mktemp("cut") / "library.so"
    whole = build_elf({".nv_fatbin": _container(_image(MACHINE_CODE, 80))})
    file.write_bytes(whole[:cut])
    expected = DeviceCode(str(file), (Architecture(8, 0),), ())
    assert read_device_code(file) in ((expected,) if cut >= len(whole) else (expected, None))
    assert read_needed(file) == ()


def test_what_is_no_file_has_no_device_code(tmp_path: Path) -> None:
    assert read_device_code(tmp_path / "missing.so") is None


def test_a_library_names_what_it_links_to() -> None:
    spec = importlib.util.find_spec("_ctypes")
    assert spec is not None
    assert spec.origin is not None
    assert any(name.startswith("libc.so") for name in read_needed(Path(spec.origin)))


CODE = DeviceCode("", (Architecture(8, 0), Architecture(9, 0, specific=True)), (Architecture(9, 0),))


@pytest.mark.parametrize(
    ("capability", "native", "compiled"),
    [
        ((7, 5), False, False),
        ((8, 0), True, False),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((9, 1), False, True),
        ((12, 0), False, True),
    ],
)
def test_machine_code_runs_within_its_major_version_and_ptx_on_all_that_came_later(
    capability: tuple[int, int], native: bool, compiled: bool
) -> None:
    assert runs_natively(CODE, capability) is native
    assert compiles_at_start(CODE, capability) is compiled
