"""What the container runs: loads its bundle, checks the answers, and says what it takes.

`BUNDLE_KEY` is the public key that must have signed the bundle. Without it, the bundle has to be part of the
image, as `several_models/Dockerfile` makes it.
"""

from __future__ import annotations

import logging
import os

from ortprep.runtime import load

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    session = load(os.environ["BUNDLE"], check="golden", require_signature=os.environ.get("BUNDLE_KEY"))
    for one in session.get_inputs():
        print(f"{one.name}: {one.type} {one.shape}")
