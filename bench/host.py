"""What does a short-lived program pay that asks a warm host? `python -m bench.host [NAME …] [--rounds 15]`.

Trained models from PyPI wheels, prepared without a search. All figures but *steady* count from the start of a
fresh process to its first result. *numpy* is one that imports numpy and has no model; *plain* uses plain ONNX
Runtime, *load* the bundle, *host* a host that has the model loaded. *steady* is a later run of `load`, in its
process. *added* is what `host` takes beside *numpy* and *steady*, in pairs of one round; also of the least of
all rounds, which other work on the machine disturbs less, and as processor time of the client. Interleaved in
changing order, the page cache warm.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from typing import Any

from bench.models import ARTIFACTS, PreparedModel
from bench.result_file import describe_machine, format_results
from bench.small_models import SMALL_MODELS, prepare_small_models
from bench.start import LoadScript, ScriptTimes, load, plain, run_script, write_script
from ortprep.measuring.comparison import order_of_round, paired_ratio
from ortprep.measuring.device_lock import measuring
from ortprep.runtime import connect
from ortprep.runtime.host.process import stop_host

DEFAULT_MODELS = ("silero-vad", "magika", "rapidocr-cls", "rapidocr-rec", "nudenet")


def ask_host(bundle: Path) -> LoadScript:
    """Returns the script of a program that asks the host."""
    return LoadScript("from ortprep.runtime import connect", f"session = connect({str(bundle)!r})")


def no_model() -> LoadScript:
    """Returns the script of a program that imports numpy and runs nothing."""
    return LoadScript("import numpy", "class session: run = staticmethod(lambda names, feeds: None)")


def measure(model: PreparedModel, *, rounds: int) -> dict[str, Any]:
    """Returns medians of a model, in ms."""
    scripts = {
        "numpy": no_model(),
        "plain": plain(model.source),
        "load": load(model.bundle),
        "host": ask_host(model.bundle),
    }
    times: dict[str, list[ScriptTimes]] = {arm: [] for arm in scripts}
    with TemporaryDirectory(prefix="host-") as folder, measuring("cpu"):
        paths = {arm: Path(folder) / f"arm-{arm}.py" for arm in scripts}
        for arm, script in scripts.items():
            write_script(script, model.sample, paths[arm], steady_s=0.2 if arm in ("load", "host") else 0)
        with connect(model.bundle, start=True):
            for index in range(-1, rounds):  # the first fills the page cache
                for arm in order_of_round(tuple(scripts), index):
                    times[arm].append(run_script(paths[arm]))
    ready = {arm: [one.ready_ms for one in found[1:]] for arm, found in times.items()}
    steady = [one.steady_ms or 0.0 for one in times["load"][1:]]
    added = [
        host - numpy - run for host, numpy, run in zip(ready["host"], ready["numpy"], steady, strict=True)
    ]
    least = {arm: min(found) for arm, found in ready.items()}
    processor = {arm: median(one.processor_ms for one in found[1:]) for arm, found in times.items()}
    return {
        **{f"{arm}_ms": round(median(found), 1) for arm, found in ready.items()},
        "steady_ms": round(median(steady), 2),
        "host_steady_ms": round(median(one.steady_ms or 0.0 for one in times["host"][1:]), 2),
        "added_ms": round(median(added), 2),
        "added_of_least_ms": round(least["host"] - least["numpy"] - min(steady), 2),
        "added_processor_ms": round(processor["host"] - processor["numpy"], 2),
        "sooner_than_plain": round(paired_ratio(ready["plain"], ready["host"]), 2),
        "sooner_than_load": round(paired_ratio(ready["load"], ready["host"]), 2),
        "host_private_mb": round(median(one.private_mb for one in times["host"][1:]), 1),
        "plain_private_mb": round(median(one.private_mb for one in times["plain"][1:]), 1),
    }


@contextmanager
def own_host() -> Iterator[None]:
    """Keeps the host of the user out of this: another is started, and ended."""
    with TemporaryDirectory(prefix="host-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        try:
            yield
        finally:
            stop_host()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(DEFAULT_MODELS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--artifacts", type=Path, default=ARTIFACTS / "small")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    names = options.names or list(DEFAULT_MODELS)
    if unknown := [name for name in names if name not in SMALL_MODELS]:
        parser.error(f"unknown model: {', '.join(unknown)}; expected {', '.join(SMALL_MODELS)}")
    models = prepare_small_models(names, options.artifacts.absolute(), reuse=True)
    results = {}
    with own_host():
        for model in models:
            results[model.name] = found = measure(model, rounds=options.rounds)
            print(f"{model.name:<14} {found}", flush=True)
    mean = round(geometric_mean(found["sooner_than_plain"] for found in results.values()), 2)
    print(f"{mean}× sooner than plain in geometric mean; at most {_most(results)} ms added")
    if options.out is not None:
        report = {"machine": describe_machine(), "rounds": options.rounds, "models": results}
        options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    return 0


def _most(results: dict[str, dict[str, Any]]) -> float:
    return max(float(found["added_ms"]) for found in results.values())


if __name__ == "__main__":
    sys.exit(main())
