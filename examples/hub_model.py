"""A model of the Hugging Face Hub: prepares it once, and loads it.

Usage: python hub_model.py        (needs the extra `hub`, and a network the first time)
"""

from __future__ import annotations

import json
from pathlib import Path

from ortprep import prepare
from ortprep.runtime import load

SPEC = Path(__file__).parent / "hub" / "hub-silero-vad.yaml"


def main() -> None:
    """Prints the source of the bundle, and what its session takes."""
    bundle = prepare(SPEC)  # into artifacts/; a second time it asks the Hub for the commit, and no more
    source = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["source"]
    print(f"{source['location']}, {source['sha256']}")
    session = load(bundle)
    for one in session.get_inputs():
        print(f"{one.name}: {one.type} {json.dumps(one.shape)}")


if __name__ == "__main__":
    main()
