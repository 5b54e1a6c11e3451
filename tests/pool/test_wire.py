from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PoolError
from pipeline.runtime.pool.wire import (
    FRAME_BYTES,
    WITH_PAYLOAD,
    Frame,
    FrameReader,
    Kind,
    Span,
    decode_content,
    encode_frame,
    encode_message,
)

_SPANS = st.builds(Span, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
_PLAIN = st.builds(
    Frame,
    st.sampled_from(sorted(set(Kind) - WITH_PAYLOAD)),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**64 - 1),
    _SPANS,
    _SPANS,
    st.integers(0, 2**64 - 1),
)
_CONTENTS = st.dictionaries(st.text(), st.text() | st.integers(-(2**53), 2**53) | st.none(), max_size=4)
_MESSAGES = st.one_of(
    _PLAIN.map(lambda frame: (frame, None)),
    st.tuples(st.sampled_from(sorted(WITH_PAYLOAD)).map(Frame), _CONTENTS),
)


def encode(message: tuple[Frame, dict[str, object] | None]) -> bytes:
    frame, content = message
    return encode_frame(frame) if content is None else encode_message(frame, content)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(_MESSAGES, max_size=6), st.lists(st.integers(0, 10_000), max_size=8))
def test_however_the_bytes_are_cut_the_same_messages_come_out(
    messages: list[tuple[Frame, dict[str, object] | None]], places: list[int]
) -> None:
    reader = FrameReader("a worker")
    data = b"".join(map(encode, messages))
    got = [item for piece in cut(data, places) for item in reader.read(piece)]
    assert len(got) == len(messages)
    for (frame, payload), (sent, content) in zip(got, messages, strict=True):
        if content is None:
            assert (frame, payload) == (sent, b"")
        else:
            assert frame.kind is sent.kind
            assert decode_content(payload, "a worker") == content


@given(st.binary(min_size=FRAME_BYTES, max_size=3 * FRAME_BYTES))
def test_garbage_is_a_pool_error_and_nothing_else(data: bytes) -> None:
    reader = FrameReader("a worker")
    if data[:4] != b"PTRO":
        with pytest.raises(PoolError, match="unreadable message from a worker"):
            list(reader.read(data))


def test_a_frame_is_written_in_one_piece() -> None:
    import select

    assert len(encode_frame(Frame(Kind.RUN))) == FRAME_BYTES <= select.PIPE_BUF


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_a_pool_error(payload: bytes) -> None:
    with pytest.raises(PoolError):
        decode_content(payload, "a worker")


def test_a_text_that_is_too_long_is_cut() -> None:
    ((_, payload),) = FrameReader("w").read(
        encode_message(Frame(Kind.FAILED), {"message": "x" * 8_000_000, "kind": "RunError"})
    )
    content = decode_content(payload, "w")
    assert content["kind"] == "RunError"
    assert len(content["message"]) == 100_000
