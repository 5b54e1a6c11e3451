"""A web service that says when there is speech in a recording."""

from __future__ import annotations

import io
import logging
import os
import wave
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool

from ortprep.runtime import load

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # ortprep, if imported first, turns its usage data off

BUNDLE = Path(__file__).parent / "artifacts" / "speech"
RATE, PIECE, OVERLAP = 16_000, 512, 64  # in Hz and samples
SPEECH, SILENCE = 0.5, 0.35  # probabilities at which speech begins and ends
MAX_BYTES = 10_000_000

log = logging.getLogger("uvicorn.error")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Loads the bundle once in every worker, before it takes requests."""
    app.state.session = load(BUNDLE, check="golden")  # also warms up
    log.info("worker %d is ready", os.getpid())
    yield


app = FastAPI(lifespan=lifespan)


@app.get("/healthz")
def healthz() -> str:
    """Answers as soon as a worker has its session."""
    return "ok"


@app.post("/speech")
async def find_speech(request: Request) -> list[tuple[float, float]]:
    """Returns the beginning and the end of speech, in seconds, in the WAV file of the body."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"expected at most {MAX_BYTES} bytes")
    samples = read_wave(bytes(body))
    segments: list[tuple[float, float]] = await run_in_threadpool(
        lambda: list(find_segments(request.app.state.session, samples))
    )
    return segments


def read_wave(body: bytes) -> np.ndarray[Any, Any]:
    """Returns the samples of a WAV file, from -1 to 1."""
    try:
        with wave.open(io.BytesIO(body)) as file:
            if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
                raise HTTPException(422, "expected 16 kHz, mono, 16 bit")
            return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    except (wave.Error, EOFError) as error:
        raise HTTPException(422, "expected a WAV file") from error


def find_segments(session: InferenceSession, samples: np.ndarray[Any, Any]) -> Iterator[tuple[float, float]]:
    """Yields the beginning and the end of every piece of speech, in seconds."""
    state, audio = np.zeros((2, 1, 128), np.float32), np.pad(samples, (OVERLAP, PIECE))
    rate, begin = np.array(RATE, np.int64), None
    for start in range(0, len(samples), PIECE):
        piece = audio[None, start : start + OVERLAP + PIECE]
        probability, state = session.run(None, {"input": piece, "state": state, "sr": rate})
        if begin is None and probability.item() >= SPEECH:
            begin = start / RATE
        elif begin is not None and probability.item() < SILENCE:
            yield begin, start / RATE
            begin = None
    if begin is not None:
        yield begin, len(samples) / RATE
