"""Says whether there is speech in three chunks of silence."""

import logging

import numpy

from ortprep.runtime import load

logging.basicConfig(level=logging.INFO)
session = load("artifacts/silero-vad")  # an onnxruntime.InferenceSession
state = numpy.zeros((2, 1, 128), numpy.float32)
rate = numpy.array(16000, numpy.int64)
for width in (576, 576, 288):
    chunk = numpy.zeros((1, width), numpy.float32)
    probability, state = session.run(None, {"input": chunk, "state": state, "sr": rate})
    print(f"speech: {probability.item():.3f}")
