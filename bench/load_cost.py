"""What does a job get? Measures process start to first result from outside, and the cost of `load` itself.

    python -m bench.load_cost [--sets small large] [--models NAME …] [--arms ARM …] [--rounds 9] [--rebuild]

Compares plain ONNX Runtime on the source with bundles, in fresh interleaved processes of plain scripts, with
a warm page cache, all prepared with the shipped defaults. *small*: trained models from PyPI wheels. *large*:
five models with seeded weights, 33 to 499 MB. *load*: in two phases where the bundle records them; later runs
are the steady session's. *by hand*: the file that `optimized_model_filepath` writes, loaded with the
optimisation off, with its weights inside or in a file of their own. Existing bundles are reused without
`--rebuild`, so that changed code can be measured without preparing again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from typing import Any

from bench.models import ARTIFACTS, PreparedModel, demo_specs, prepare_specs
from bench.result_file import describe_machine, format_results
from bench.small_models import SMALL_MODELS, prepare_small_models
from bench.start import (
    ROOT,
    LoadScript,
    ScriptTimes,
    load,
    optimize_by_hand,
    plain,
    run_script,
    same_file,
    write_script,
)
from ortprep.bundle.codec import encode
from ortprep.bundle.figures import Samples
from ortprep.bundle.manifest import read_manifest
from ortprep.errors import PipelineError
from ortprep.measuring.comparison import centre, order_of_round, paired_ratio
from ortprep.measuring.device_lock import measuring

PLAIN, LOAD, IMPORTED, FALLBACK = "plain", "load", "load, imported", "portable"
HAND, HAND_OUTSIDE = "by hand", "by hand, weights outside"
SAME_FILE = "InferenceSession, same file"
NEW_CONTAINER, NOT_HASHED = "load, new container", "load, new container, not hashed"

LARGE = ("resnet50", "densenet121", "bert-base", "gpt2", "bilstm")

LoadScripts = Mapping[str, LoadScript]
Results = Mapping[str, Sequence[ScriptTimes]]
"""By arm, one per round."""


@dataclass(frozen=True)
class Subject:
    """A model, with the scripts that are compared.

    Attributes:
        name: Name of the model.
        source: The model file.
        bundle: The bundle whose manifest says what `LOAD` gets.
        sample: `.npz` with one array per input.
        scripts: By arm; plain ONNX Runtime first.
    """

    name: str
    source: Path
    bundle: Path
    sample: Path
    scripts: LoadScripts


def _defaults() -> str:
    return (ROOT / "configs" / "defaults.yaml").read_text(encoding="utf-8")


def small_subjects(names: Sequence[str], options: argparse.Namespace) -> list[Subject]:
    """Prepares the small models with the shipped defaults."""
    artifacts = options.artifacts / "small-defaults"
    found = prepare_small_models(names, artifacts, defaults=_defaults(), reuse=not options.rebuild)
    return [_subject(model) for model in found]


def large_subjects(names: Sequence[str], options: argparse.Namespace) -> list[Subject]:
    """Prepares the large models with the shipped defaults."""
    artifacts = options.artifacts / "large-defaults"
    found = prepare_specs(demo_specs(names), artifacts, defaults=_defaults(), reuse=not options.rebuild)
    return [_subject(model) for model in found]


def _subject(model: PreparedModel) -> Subject:
    scripts = {
        PLAIN: plain(model.source),
        LOAD: load(model.bundle),
        HAND: optimize_by_hand(model.source),
        HAND_OUTSIDE: optimize_by_hand(model.source, outside=True),
        SAME_FILE: same_file(model.bundle),
        IMPORTED: load(model.bundle, imported=True),
        FALLBACK: load(model.bundle, more=", target='portable'"),
        NEW_CONTAINER: load(model.bundle, new_container=True),
        NOT_HASHED: load(model.bundle, more=", digests='off'", new_container=True),
    }
    return Subject(model.name, model.source, model.bundle, model.sample, scripts)


SETS: Mapping[str, tuple[Sequence[str], Callable[..., list[Subject]], float]] = {
    "small": (tuple(SMALL_MODELS), small_subjects, 0.2),
    "large": (LARGE, large_subjects, 0.5),
}
"""Names of the models, what prepares them, and seconds of later runs per process."""


def measure(subject: Subject, *, rounds: int, steady_s: float) -> Results:
    """Measures a model's scripts in interleaved fresh processes.

    Raises:
        StageError: A script failed.
    """
    results: dict[str, list[ScriptTimes]] = {arm: [] for arm in subject.scripts}
    with TemporaryDirectory(prefix="load-cost-") as folder, measuring("cpu"):
        paths = {}
        for index, (arm, script) in enumerate(subject.scripts.items()):
            paths[arm] = Path(folder) / f"script{index}.py"
            later_s = 0 if arm in (SAME_FILE, IMPORTED, NEW_CONTAINER, NOT_HASHED) else steady_s
            write_script(script, subject.sample, paths[arm], steady_s=later_s)
        for arm in paths:  # fills the page cache and the memory of digests; not counted
            run_script(paths[arm])
        for index in range(rounds):
            for arm in order_of_round(tuple(paths), index):
                results[arm].append(run_script(paths[arm]))
    return results


def ratio(results: Results, arm: str, read: Callable[[ScriptTimes], float]) -> float:
    """Returns how many times larger plain ONNX Runtime's figure is than an arm's, by pairs of a round."""
    return paired_ratio([read(start) for start in results[PLAIN]], [read(start) for start in results[arm]])


def difference(results: Results, arm: str, other: str, read: Callable[[ScriptTimes], float]) -> float:
    """Returns by how much an arm's figure is larger than another arm's, by pairs of a round."""
    pairs = zip(results[arm], results[other], strict=True)
    return centre([read(one) - read(two) for one, two in pairs])


def _ready(start: ScriptTimes) -> float:
    return start.ready_ms


def _steady(start: ScriptTimes) -> float:
    return start.steady_ms or 0.0


@dataclass(frozen=True)
class Verdict:
    """A goal and its result.

    Attributes:
        goal: The goal.
        got: The figure.
        reached: Whether it is within the bound.
    """

    goal: str
    got: float
    reached: bool


def compare(results: Results) -> dict[str, float]:
    """Returns one model's figures relative to plain ONNX Runtime, and what `load` adds, in ms."""
    figures = {}
    arms = {LOAD: "load", HAND: "hand", HAND_OUTSIDE: "hand_outside", FALLBACK: "fallback"}
    for arm, name in arms.items():
        if arm in results:
            figures[f"{name}_sooner"] = ratio(results, arm, _ready)
            pairs = zip(results[PLAIN], results[arm], strict=True)
            spread = Samples.of([_ready(one) / _ready(two) for one, two in pairs])
            figures[f"{name}_sooner_p25"], figures[f"{name}_sooner_p75"] = spread.p25, spread.p75
            figures[f"{name}_steady"] = 1 / ratio(results, arm, _steady)
            figures[f"{name}_private"] = 1 / ratio(results, arm, lambda start: start.private_mb)
    for arm, name in ((NEW_CONTAINER, "new_container"), (NOT_HASHED, "not_hashed")):
        if arm in results:
            figures[f"{name}_sooner"] = ratio(results, arm, _ready)
    if IMPORTED in results:
        plain_call = [start.init_ms + start.first_ms for start in results[PLAIN]]
        figures["load_call_sooner"] = paired_ratio(plain_call, [one.call_ms for one in results[IMPORTED]])
    if SAME_FILE in results and IMPORTED in results:
        pairs = zip(results[IMPORTED], results[SAME_FILE], strict=True)
        figures["load_adds_ms"] = centre([one.import_ms + one.init_ms - two.init_ms for one, two in pairs])
    if SAME_FILE in results and LOAD in results:
        figures["load_adds_to_process_ms"] = difference(results, LOAD, SAME_FILE, lambda one: one.ready_ms)
        figures["load_adds_processor_ms"] = difference(results, LOAD, SAME_FILE, lambda one: one.processor_ms)
    return figures


def judge(kind: str, figures: Mapping[str, Mapping[str, float]]) -> list[Verdict]:
    """Returns the verdicts of a set's goals; those of arms that were left out are not among them.

    Args:
        kind: Key of `SETS`.
        figures: What `compare` returned, by model.
    """
    verdicts: list[Verdict] = []

    def ask(name: str, over: Callable[[list[float]], float], what: str, bound: float, *, least: bool) -> None:
        values = [of_model[name] for of_model in figures.values() if name in of_model]
        if values:
            got = over(values)
            goal = f"{what}, {'at least' if least else 'at most'} {bound:g}"
            verdicts.append(Verdict(goal, got, got >= bound if least else got <= bound))

    means, floors = {"small": (1.1, 0.97), "large": (2.4, 1.0)}[kind]
    ready = "process start to first result, times sooner"
    ask("load_sooner", geometric_mean, f"{ready}, geometric mean", means, least=True)
    ask("load_sooner", min, f"{ready}, least", floors, least=True)
    if kind == "small":
        ask("load_adds_ms", median, "load adds to InferenceSession, ms, median", 3, least=False)
        ask("load_adds_to_process_ms", median, "load adds to the process, ms, median", 6, least=False)
    else:
        ask(
            "load_call_sooner",
            geometric_mean,
            "around the call, times sooner, geometric mean",
            4.6,
            least=True,
        )
        ask("load_steady", max, "later run, largest", 1.03, least=False)
    ask("fallback_steady", max, "steady run of the portable variant, largest", 1.03, least=False)
    return verdicts


def compare_with_manifest(bundle: Path, results: Results) -> dict[str, Any]:
    """Returns the manifest's *ready* and the scripts', and whether their ranges between quartiles overlap."""
    record = read_manifest(bundle).variants[0]
    warm = next((one for one in record.measurements if one.cache == "warm"), None)
    if warm is None or record.decision is None or LOAD not in results:
        return {}
    stated = {figures.plan: figures.ready_ms for figures in warm.plans}
    found = {}
    for arm, plan in ((PLAIN, "default"), (LOAD, record.decision.shipped)):
        inside, outside = stated.get(plan), Samples.of([start.ready_ms for start in results[arm]])
        if inside is not None:
            agree = inside.p25 <= outside.p75 and outside.p25 <= inside.p75
            found[arm] = {"manifest_ms": encode(inside), "outside_ms": encode(outside), "agree": agree}
    return found


def measure_set(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Prepares and measures a set of models; returns figures, verdicts and the machine as JSON types."""
    every, prepare, steady_s = SETS[kind]
    names = [name for name in every if not options.models or name in options.models]
    figures, medians, manifests, sizes, shipped = {}, {}, {}, {}, {}
    for subject in prepare(names, options) if names else []:
        arms = (PLAIN, *(options.arms or subject.scripts))
        scripts = {arm: script for arm, script in subject.scripts.items() if arm in arms}
        results = measure(replace(subject, scripts=scripts), rounds=options.rounds, steady_s=steady_s)
        sizes[subject.name] = subject.source.stat().st_size / 1e6
        figures[subject.name] = compare(results)
        medians[subject.name] = {arm: summarise_arm(starts) for arm, starts in results.items()}
        manifests[subject.name] = compare_with_manifest(subject.bundle, results)
        decision = read_manifest(subject.bundle).variants[0].decision
        shipped[subject.name] = decision and decision.shipped
        print(row(subject.name, figures[subject.name]), file=sys.stderr, flush=True)
    agreements = [one["agree"] for of_model in manifests.values() for one in of_model.values()]
    verdicts = judge(kind, figures)
    if agreements:
        share = sum(agreements) / len(agreements)
        verdicts.append(Verdict("share of the manifest's ready that agrees, at least 1", share, share >= 1))
    return {
        "machine": describe_machine(),
        "rounds": options.rounds,
        "verdicts": encode(tuple(verdicts)),
        "source_mb": sizes,
        "shipped": shipped,
        "ratios": figures,
        "manifest": manifests,
        "models": medians,
    }


def summarise_arm(starts: Sequence[ScriptTimes]) -> dict[str, Any]:
    """Returns the order statistics of everything that was measured of a script."""
    columns = {
        name: [getattr(start, name) for start in starts] for name in (*ScriptTimes.__annotations__, "call_ms")
    }
    return {name: Samples.of(values).statistics() for name, values in columns.items() if None not in values}


COLUMNS = (
    ("load_sooner", "load", "{:.2f}×"),
    ("load_steady", "steady", "{:.2f}"),
    ("load_private", "memory", "{:.2f}"),
    ("load_adds_ms", "adds ms", "{:.1f}"),
    ("load_adds_to_process_ms", "process", "{:.1f}"),
    ("load_adds_processor_ms", "cpu ms", "{:.1f}"),
    ("load_call_sooner", "call", "{:.2f}×"),
    ("new_container_sooner", "new", "{:.2f}×"),
    ("not_hashed_sooner", "no hash", "{:.2f}×"),
    ("hand_sooner", "by hand", "{:.2f}×"),
    ("hand_outside_sooner", "outside", "{:.2f}×"),
    ("fallback_sooner", "fallb.", "{:.2f}×"),
    ("fallback_steady", "steady", "{:.2f}"),
)
"""Of the table: figure of `compare`, title, format; × is how many times sooner, others relative to plain."""


def row(name: str, figures: Mapping[str, float]) -> str:
    """Returns one model's line of the table."""
    cells = (layout.format(figures[key]) if key in figures else "" for key, _, layout in COLUMNS)
    return f"{name:<18}" + "".join(f"{cell:>9}" for cell in cells)


def build_table(kind: str, section: Mapping[str, Any]) -> str:
    """Returns a line per model, and one per goal."""
    lines = ["", f"{kind:<18}" + "".join(f"{title:>9}" for _, title, _ in COLUMNS)]
    lines += [row(name, figures) for name, figures in section["ratios"].items()]
    for verdict in section["verdicts"]:
        said = "reached" if verdict["reached"] else "MISSED "
        lines.append(f"{said}  {verdict['got']:6.2f}  {verdict['goal']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares, measures and reports; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.load_cost", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [name for every, _, _ in SETS.values() for name in every]
    arms = (LOAD, HAND, HAND_OUTSIDE, SAME_FILE, IMPORTED, FALLBACK, NEW_CONTAINER, NOT_HASHED)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--models", nargs="+", choices=names, metavar="NAME", help="default: all")
    parser.add_argument("--arms", nargs="+", choices=arms, metavar="ARM", help=f"of {arms}; default: all")
    parser.add_argument("--rounds", type=int, default=9, choices=range(3, 100), metavar="N")
    parser.add_argument("--artifacts", type=Path, default=ARTIFACTS)
    parser.add_argument("--rebuild", action="store_true", help="prepare again whatever is not up to date")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file, set by set")
    options = parser.parse_args(arguments)
    options.artifacts = options.artifacts.absolute()
    report = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    try:
        for kind in options.sets:
            report[kind] = measure_set(kind, options)
            if options.out:  # after each set: a long run that is cut short is not lost
                options.out.write_text(format_results(report) + "\n", encoding="utf-8")
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for kind in options.sets:
        print(build_table(kind, report[kind]))
    return 0 if all(one["reached"] for kind in options.sets for one in report[kind]["verdicts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
