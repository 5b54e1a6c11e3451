"""A web service that says what type of file it was sent."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool

from ortprep.runtime import load

FOLDER = Path(__file__).parent
CONFIG = json.loads((FOLDER / "models" / "config.min.json").read_text())
BLOCK, SIDE, PADDING = CONFIG["block_size"], CONFIG["beg_size"], CONFIG["padding_token"]
MIN_SIZE, MAX_SIZE = CONFIG["min_file_size_for_dl"], 10_000_000

log = logging.getLogger("uvicorn.error")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Loads the bundle once in every worker, before it takes requests."""
    app.state.session = load(FOLDER / "artifacts" / "file-type", check="golden")  # also warms up
    log.info("worker %d is ready", os.getpid())
    yield


app = FastAPI(lifespan=lifespan)


@app.get("/healthz")
def healthz() -> str:
    """Answers as soon as a worker has its session."""
    return "ok"


@app.post("/type")
async def file_type(request: Request) -> dict[str, Any]:
    """Returns the most likely type of the file in the body."""
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_SIZE:
            raise HTTPException(413, f"expected at most {MAX_SIZE} bytes")
    if len(content) < MIN_SIZE:
        raise HTTPException(422, f"expected at least {MIN_SIZE} bytes, got {len(content)}")
    session = request.app.state.session
    (scores,) = await run_in_threadpool(session.run, None, {"bytes": to_tensor(content)})
    best = int(scores[0].argmax())
    return {"type": CONFIG["target_labels_space"][best], "score": round(float(scores[0, best]), 3)}


def to_tensor(content: bytes) -> np.ndarray[Any, Any]:
    """Returns the beginning and the end of a file as [1, 2048], as Magika takes them."""
    begin, end = content[:BLOCK].lstrip()[:SIDE], content[-BLOCK:].rstrip()[-SIDE:]
    row = np.full(2 * SIDE, PADDING, np.int32)
    row[: len(begin)] = np.frombuffer(begin, np.uint8)
    row[2 * SIDE - len(end) :] = np.frombuffer(end, np.uint8)
    return row[None]
