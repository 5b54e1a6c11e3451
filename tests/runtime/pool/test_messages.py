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
from ortprep.runtime.pool.messages import (
    HEAD_BYTES,
    Head,
    LayoutReader,
    MessageKind,
    decode_head,
    decode_json,
    encode,
    encode_head,
    encode_tensors,
    lay_out,
)
from ortprep.runtime.tensors.array_layout import INLINE_BYTES, MAX_PACKET_BYTES, encode_shape

_SHAPES = st.lists(st.lists(st.integers(0, 64), max_size=5).map(tuple), min_size=1, max_size=5).map(tuple)
_ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


def packet_of(layout, itemsize):
    arrays = [np.zeros(shape, f"V{itemsize}") for shape in layout.shapes] if not layout.slot_bytes else ()
    fields = {"model": 3, "begin": 4096, "size": 5, "figure": 6}
    return memoryview(bytearray(encode_tensors(MessageKind.DONE, 7, layout, arrays, **fields)))


@given(_SHAPES, _ITEMSIZES)
def test_tensors_are_laid_out_one_after_the_other_and_read_as_they_were_written(shapes, itemsize):
    itemsizes = (itemsize,) * len(shapes)
    layout = lay_out(shapes, itemsizes)
    packet = packet_of(layout, itemsize)
    head = decode_head(packet, "test")
    assert head == Head(MessageKind.DONE, 3, len(layout.text), 7, 4096, 5, 6)
    reader = LayoutReader(itemsizes, "test")
    assert reader.read(packet, head, layout.slot_bytes) == layout
    assert reader.read(packet, head, layout.slot_bytes) is reader.read(packet, head, 2**40)
    end = HEAD_BYTES + len(layout.text) if not layout.slot_bytes else 0
    for shape, offset in zip(shapes, layout.offsets, strict=True):
        assert offset >= end
        assert offset % 64 == 0
        end = offset + math.prod(shape) * itemsize
    assert end <= layout.end <= (layout.slot_bytes or len(packet))
    assert layout.slot_bytes == 0 or layout.data_bytes > INLINE_BYTES - 64 * len(shapes)
    assert len(packet) <= MAX_PACKET_BYTES


@given(_SHAPES, _ITEMSIZES, st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_places_that_lie_inside(shapes, itemsize, at, value):
    layout = lay_out(shapes, (itemsize,) * len(shapes))
    packet = packet_of(layout, itemsize)
    packet[at % (HEAD_BYTES + len(layout.text))] = value
    try:
        head = decode_head(packet, "test")
        got = LayoutReader([itemsize] * len(shapes), "test").read(packet, head, layout.slot_bytes)
    except PoolError:
        return
    for shape, offset in zip(got.shapes, got.offsets, strict=True):
        limit = layout.slot_bytes if got.slot_bytes else len(packet)
        assert offset + math.prod(shape) * itemsize <= limit


@given(st.binary(max_size=200))
def test_garbage_is_a_pool_error_and_nothing_else(data):
    packet = memoryview(data)
    with suppress(PoolError):
        head = decode_head(packet, "test")
        assert len(LayoutReader([4], "test").read(packet, head, 0).shapes) == 1
    with suppress(PoolError):
        assert isinstance(decode_json(packet, "test"), dict)


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (0, 2**63), (2**40, 2**40), (1,) * 33])
def test_a_shape_that_no_array_can_have_is_a_pool_error(shape):
    text = encode_shape(shape)
    packet = memoryview(encode_head(MessageKind.DONE, 7, text_bytes=len(text)) + text)
    with pytest.raises(PoolError, match="impossible"):
        LayoutReader([4], "test").read(packet, decode_head(packet, "test"), 2**60)


@pytest.mark.attack
def test_outputs_that_do_not_fit_together_or_hide_bytes_are_refused():
    reader = LayoutReader([4] * 50, "answer of m")
    layout = lay_out(((2**18,),) * 50, (4,) * 50)
    packet = memoryview(encode_tensors(MessageKind.DONE, 1, layout))
    head = decode_head(packet, "test")
    with pytest.raises(PoolError, match="outside of its memory"):
        reader.read(packet, head, 2**20)
    hiding = memoryview(bytes(packet) + bytes(1000))
    with pytest.raises(PoolError, match="1000 bytes too many"):
        reader.read(hiding, head._replace(text_bytes=len(layout.text) + 1000), 2**26)


def test_tensors_that_are_too_many_for_a_packet_are_an_error():
    with pytest.raises(PoolError, match="too many tensors"):
        lay_out(((1,),) * 10_000, (4,) * 10_000)


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
