"""What the container runs: loads its bundle, checks the answers, and says what it takes."""

from __future__ import annotations

import logging
import os

from ortprep.runtime import load

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    session = load(os.environ["BUNDLE"], check="golden")
    for one in session.get_inputs():
        print(f"{one.name}: {one.type} {one.shape}")
