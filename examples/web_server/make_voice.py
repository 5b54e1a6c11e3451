"""Writes voice.wav: 1 s of silence, 2 s of a voice that says "a", and 1 s of silence."""

import wave

import numpy as np

RATE = 16_000
seconds = np.arange(2 * RATE) / RATE
phase = 2 * np.pi * np.cumsum(120 + 10 * np.sin(2 * np.pi * 3 * seconds)) / RATE
voice = np.zeros_like(seconds)
for harmonic in range(1, 30):
    formants = sum(np.exp(-(((120 * harmonic - centre) / 120) ** 2)) for centre in (730, 1090, 2440))
    voice += (0.03 + formants) * np.sin(harmonic * phase)
voice *= 0.6 + 0.4 * np.sin(2 * np.pi * 4 * seconds)
silence = np.zeros(RATE)
samples = np.concatenate([silence, 0.3 * voice / np.abs(voice).max(), silence])
with wave.open("voice.wav", "wb") as file:
    file.setnchannels(1)
    file.setsampwidth(2)
    file.setframerate(RATE)
    file.writeframes((samples * 32767).astype(np.int16).tobytes())
