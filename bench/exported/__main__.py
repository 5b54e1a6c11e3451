"""Exports the named models, or all of them."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.exported.exportable import Exportable

MODELS: Mapping[str, str] = {
    "bert-base": "text:BERT_BASE",
    "bert-base-torchscript": "text:BERT_BASE_TORCHSCRIPT",
    "gpt2": "text:GPT2",
    "vit-base": "vision:VIT_BASE",
    "resnet50": "resnet:RESNET50",
    "unet": "unet:UNET",
    "conv1d-net": "signals:CONV1D_NET",
    "bilstm": "signals:BILSTM",
}
"""Where each model is declared."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exports and checks; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.exported", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="may exist")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in MODELS]
    if unknown:
        parser.error(f"unknown model: {', '.join(unknown)}; expected {', '.join(MODELS)}")
    # Imported here, so that help comes without the seconds that torch takes.
    exporting = importlib.import_module("bench.exported.exporting")
    for name in options.names or MODELS:
        started = time.perf_counter()
        path = exporting.export_model(name, _declared(name), options.out)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - started:.1f} s")
    return 0


def _declared(name: str) -> Exportable:
    module, _, constant = MODELS[name].partition(":")
    model: Exportable = getattr(importlib.import_module(f"bench.exported.{module}"), constant)
    return model


if __name__ == "__main__":
    sys.exit(main())
