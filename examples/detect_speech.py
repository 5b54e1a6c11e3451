"""Voice activity on a stream: a model that hands its state from run to run.

Usage: python detect_speech.py recording.wav        (16 kHz, mono, 16 bit)
"""

from __future__ import annotations

import sys
import wave
from collections.abc import Iterator

import numpy as np

from ortprep.runtime import load

RATE, PIECE, OVERLAP = 16_000, 512, 64  # in Hz and samples
SPEECH, SILENCE = 0.5, 0.35  # probabilities at which speech begins and ends


def stream(path: str) -> Iterator[bytes]:
    """Yields pieces of 32 ms, as a microphone would deliver them."""
    with wave.open(path) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{path}: expected 16 kHz, mono, 16 bit")
        while len(piece := file.readframes(PIECE)) == 2 * PIECE:
            yield piece


def main(path: str) -> None:
    """Prints when speech begins and ends."""
    session = load("artifacts/silero-vad")
    state, before = np.zeros((2, 1, 128), np.float32), np.zeros((1, OVERLAP), np.float32)
    is_speech, seconds = False, 0.0
    for piece in stream(path):
        samples = np.frombuffer(piece, np.int16).astype(np.float32)[None] / 32768
        audio = np.concatenate([before, samples], axis=1)
        inputs = {"input": audio, "state": state, "sr": np.array(RATE, np.int64)}
        probability, state = session.run(None, inputs)
        before = audio[:, -OVERLAP:]
        if (probability.item() >= (SILENCE if is_speech else SPEECH)) != is_speech:
            is_speech = not is_speech
            print(f"{seconds:7.3f} s  {'speech' if is_speech else 'silence'} ({probability.item():.3f})")
        seconds += PIECE / RATE


if __name__ == "__main__":
    main(sys.argv[1])
