"""Messages say what was meant, and whatever else arrives is an error."""

from __future__ import annotations

import json
import math
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.errors import PoolError
from ortprep.runtime.pool.memory import pack_inline
from ortprep.runtime.pool.messages import (
    HEAD_BYTES,
    IN_FILE,
    IN_PACKET,
    IN_SLOT,
    INLINE_BYTES,
    MAX_PACKET_BYTES,
    Head,
    Layout,
    MessageKind,
    PlaceReader,
    decode_head,
    decode_json,
    encode,
    encode_head,
    encode_tensors,
    fit_into,
    lay_out,
)

_SHAPES = st.lists(st.lists(st.integers(0, 64), max_size=5).map(tuple), min_size=1, max_size=5).map(tuple)
_ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


def sizes_of(shapes: tuple[tuple[int, ...], ...], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape) * itemsize for shape in shapes)


def packet_of(layout: Layout, sizes: tuple[int, ...]) -> memoryview:
    begin = encode_tensors(MessageKind.DONE, 7, layout, model=3, begin=4096, size=5, figure=6)
    arrays = [np.zeros(size, np.uint8) for size in sizes]
    return memoryview(bytearray(begin if layout.slot_bytes else pack_inline(begin, layout, arrays)))


@given(_SHAPES, _ITEMSIZES, st.data())
def test_tensors_are_laid_out_one_after_the_other_and_read_as_they_were_written(shapes, itemsize, data):
    sizes = sizes_of(shapes, itemsize)
    offsets = tuple(data.draw(st.none() | st.integers(0, 2**40)) for _ in shapes)
    layout = lay_out(shapes, sizes, offsets)
    packet = packet_of(layout, sizes)
    head = decode_head(packet, "test")
    assert head == Head(MessageKind.DONE, 3, len(shapes), len(layout.text), 7, 4096, 5, 6)
    reader = PlaceReader([itemsize] * len(shapes), "test")
    assert reader.read(packet, head, layout.slot_bytes) == layout.places
    assert reader.read(packet, head, layout.slot_bytes) is reader.read(packet, head, 2**40)
    end = HEAD_BYTES + len(layout.text) if not layout.slot_bytes else 0
    for place, size, offset in zip(layout.places, sizes, offsets, strict=True):
        if offset is not None:
            assert (place.base, place.offset) == (IN_FILE, offset)
            continue
        assert place.base == (IN_SLOT if layout.slot_bytes else IN_PACKET)
        assert place.offset >= end
        assert place.offset % 64 == 0
        end = place.offset + size
    assert end <= (layout.slot_bytes or len(packet))
    if layout.slot_bytes:
        assert fit_into(layout, 128, layout.slot_bytes + 127) is None
        moved = fit_into(layout, 128, layout.slot_bytes + 128)
        assert moved is not None
        pairs = zip(layout.places, moved.places, strict=True)
        shifts = [after.offset - before.offset for before, after in pairs]
        assert shifts == [128 if offset is None else 0 for offset in offsets]
    copied = sum(size for size, offset in zip(sizes, offsets, strict=True) if offset is None)
    assert layout.slot_bytes == 0 or copied > INLINE_BYTES - 64 * len(shapes)
    assert len(packet) <= MAX_PACKET_BYTES


@given(_SHAPES, _ITEMSIZES, st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_places_that_lie_inside(shapes, itemsize, at, value):
    layout = lay_out(shapes, sizes_of(shapes, itemsize))
    packet = packet_of(layout, sizes_of(shapes, itemsize))
    packet[at % (HEAD_BYTES + len(layout.text))] = value
    try:
        head = decode_head(packet, "test")
        places = PlaceReader([itemsize] * len(shapes), "test").read(packet, head, layout.slot_bytes)
    except PoolError:
        return
    for place in places:
        size = math.prod(place.shape) * itemsize
        limit = {IN_PACKET: len(packet), IN_SLOT: layout.slot_bytes}.get(place.base, 2**64)
        assert size == 0 or place.offset + size <= limit


@given(st.binary(max_size=200))
def test_garbage_is_a_pool_error_and_nothing_else(data):
    packet = memoryview(data)
    with suppress(PoolError):
        head = decode_head(packet, "test")
        assert len(PlaceReader([4], "test").read(packet, head, 0)) == 1
    with suppress(PoolError):
        assert isinstance(decode_json(packet, "test"), dict)


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (0, 2**63), (2**40, 2**40), (1,) * 33])
def test_a_shape_that_no_array_can_have_is_a_pool_error(shape):
    layout = lay_out((shape,), (0,))
    packet = packet_of(layout, (0,))
    with pytest.raises(PoolError):
        PlaceReader([4], "test").read(packet, decode_head(packet, "test"), 0)


def test_tensors_that_are_too_many_for_a_packet_are_an_error():
    with pytest.raises(PoolError, match="too many tensors"):
        lay_out(((1,),) * 4000, (4,) * 4000)


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b"[" * 10_000])
def test_what_is_no_object_is_a_pool_error(text):
    packet = memoryview(encode_head(MessageKind.FAILED) + text)
    with pytest.raises(PoolError, match="unreadable message"):
        decode_json(packet, "test")


def test_a_text_that_is_too_long_is_cut():
    content = {"kind": "RunError", "message": "ä" * 10**6, "hint": None}
    packet = memoryview(encode(MessageKind.FAILED, 9, content))
    assert len(packet) <= MAX_PACKET_BYTES
    got = decode_json(packet, "test")
    assert got["kind"] == "RunError"
    assert got["message"].startswith("ää")
    assert json.loads(json.dumps(got)) == got
