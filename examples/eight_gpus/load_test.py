"""Sends random images to a server for some seconds, and says how many it answered, and how fast."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput

MODEL = "page-orientation"


def send(address: str, token: str, batch: int, deadline: float, times_ms: list[float]) -> None:
    """Sends one request after the other until the deadline."""
    images = np.random.default_rng().uniform(-2, 2.5, (batch, 3, 224, 224)).astype(np.float32)
    tensor = InferInput("x", images.shape, "FP32")
    tensor.set_data_from_numpy(images)  # as bytes, not as JSON
    client = InferenceServerClient(address)
    while time.monotonic() < deadline:
        start = time.perf_counter()
        answer = client.infer(MODEL, [tensor], headers={"Authorization": f"Bearer {token}"})
        times_ms.append((time.perf_counter() - start) * 1000)
        if answer.as_numpy("fetch_name_0").shape != (batch, 4):
            raise ValueError("a wrong answer")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5)
    given = parser.parse_args()
    token, times = Path("token").read_text().strip(), list[float]()
    arguments = (given.address, token, given.batch, time.monotonic() + given.seconds, times)
    threads = [threading.Thread(target=send, args=arguments) for _ in range(given.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not times:
        sys.exit(f"no answer from {given.address}: is the server running? See serve.log.")
    print(
        f"clients {given.clients}, images per request {given.batch}: "
        f"{len(times) * given.batch / given.seconds:.0f} images/s, "
        f"p50 {np.percentile(times, 50):.0f} ms, p99 {np.percentile(times, 99):.0f} ms"
    )
