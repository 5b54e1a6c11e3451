"""The commands. Each reads its arguments, calls the library, and hands the answer to the console."""

from __future__ import annotations

import functools
import logging
import shlex
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

import pipeline
from pipeline.bundle.codec import encode
from pipeline.bundle.manifest import MANIFEST_FILE, read_manifest
from pipeline.bundle.verification import check_bundle
from pipeline.cli.console import (
    INTERRUPTED,
    BuildObserver,
    say,
    say_error,
    start_logging,
    start_streams,
    write_json,
    write_line,
    write_table,
)
from pipeline.cli.tables import build_figures_table, build_variants_table, describe_bundle
from pipeline.errors import DISK_ERRORS, BundleError, MissingExtraError, PipelineError, hint_of_os_error
from pipeline.runtime.checking import check_variants
from pipeline.runtime.hardware import read_hardware
from pipeline.runtime.loading.bundle_loader import check_choice
from pipeline.runtime.loading.variant_selection import FASTEST, PRECISIONS

P = ParamSpec("P")

app = typer.Typer(
    name="ortprep",
    help="Prepare ONNX models once, so that ONNX Runtime sessions come up in milliseconds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Models; all if none is named.")]
Configs = Annotated[Path, typer.Option(help="Folder of specs.")]
Artifacts = Annotated[Path, typer.Option(help="Folder of bundles.")]
Target = Annotated[str | None, typer.Option(metavar="T", help="Build this target alone: cpu or cuda.")]
SkipUnavailable = Annotated[
    bool, typer.Option("--skip-unavailable", help="Leave out targets this machine lacks.")
]
Devices = Annotated[
    list[str] | None, typer.Option(metavar="D", help="all, cpu, cuda:0, …; may be given several times.")
]
Precision = Annotated[
    str, typer.Option(metavar="P", help="fp32, fp16, …; else the fastest that is accurate enough.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")]

_EXTRAS = {
    **dict.fromkeys(("onnx", "doit", "yaml", "pydantic", "filelock", "optuna"), "build"),
    "fsspec": "registry",
}
"""What the package can be installed without, and the extra that brings it."""

CONFIGS = Path("configs")
ARTIFACTS = Path("artifacts")


def run() -> int:
    """Runs the command line and returns the exit code; the border where errors become messages."""
    # Imported here, since its commands are put on the app that this module makes.
    from pipeline.cli import (  # noqa: F401
        compare_command,
        doctor_commands,
        export_commands,
        prepare_command,
        registry_commands,
        report_commands,
    )

    start_streams()
    try:
        app(standalone_mode=True)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    except Exception:  # noqa: BLE001 - the border: what Python would write itself may quote a model
        say(traceback.format_exc())
        return 1
    return 0


def command(function: Callable[P, None], *, group: typer.Typer = app) -> Callable[P, None]:
    """Makes a function a command: what it raises becomes a message and an exit code.

    Args:
        function: The command.
        group: What it is a command of.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except PipelineError as error:
            say_error(error)
            raise typer.Exit(error.exit_code) from None
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get(str(error.name).partition(".")[0])
            if extra is None:
                raise
            problem = f"this command needs {error.name}, which is not installed"
            say_error(MissingExtraError(problem, hint=f"pip install 'ortprep[{extra}]'"))
            raise typer.Exit(MissingExtraError.exit_code) from None
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            hint = hint_of_os_error(error, ".", tempfile.gettempdir())
            say_error(PipelineError(str(error.strerror), hint=hint))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            say(INTERRUPTED)
            raise typer.Exit(130) from None

    return group.command(name=function.__name__.strip("_").replace("_", "-"))(guarded)


def _version(wanted: bool) -> None:
    if wanted:
        write_line(f"ortprep {pipeline.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    log: Annotated[str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    del version
    if log is not None and log.upper() not in logging.getLevelNamesMapping():
        raise typer.BadParameter(f"expected debug, info, warning or error, got {log!r}", param_hint="--log")
    start_logging(log)


def exit_code_of(errors: Sequence[PipelineError]) -> int:
    """Returns the errors' own exit code where they agree."""
    kinds = {error.exit_code for error in errors}
    return kinds.pop() if len(kinds) == 1 else 1


@command
def explain(
    names: Names = None,
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    target: Target = None,
    skip_unavailable: SkipUnavailable = False,
    json: AsJson = False,
) -> None:
    """Say what `prepare` would do, and why."""
    from pipeline.bundle.digest import DigestCache
    from pipeline.graph.build import plan_builds
    from pipeline.graph.explain import explain_tasks, format_explanations

    builds = plan_builds(
        configs, artifacts, names=names or (), only=target, skip_unavailable=skip_unavailable
    )
    explanations = [item for tasks in builds for item in explain_tasks(tasks, cache=DigestCache())]
    if json:
        write_json(
            [{"model": e.model, "task": str(e.task), "reasons": list(e.reasons)} for e in explanations]
        )
    else:
        for line in format_explanations(explanations):
            write_line(line)


@command
def tune(
    names: Names = None,
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    target: Target = None,
    skip_unavailable: SkipUnavailable = False,
    json: AsJson = False,
) -> None:
    """Search for the best way to store, load and run models, and show every trial."""
    from pipeline.cli.tuning_tables import build_trials_table, describe_search
    from pipeline.graph.build import plan_builds
    from pipeline.graph.doit_tasks import run_doit
    from pipeline.graph.tuning import read_searches, tune_tasks

    builds = plan_builds(
        configs, artifacts, names=names or (), only=target, skip_unavailable=skip_unavailable
    )
    tasks = tune_tasks(builds, named=bool(names))
    code, errors = run_doit(builds, BuildObserver(), tasks=[task.name for task in tasks])
    if code:
        raise typer.Exit(exit_code_of(errors))
    searches = read_searches(tasks)
    if json:
        write_json({name: encode(record) for name, record in searches.items()})
        return
    for name, record in searches.items():
        write_table(build_trials_table(record, title=name))
        for line in describe_search(record):
            write_line(line)


@command
def trial(
    name: Annotated[str, typer.Argument(help="Model.")],
    number: Annotated[int, typer.Argument(help="Number of the trial, as `ortprep tune` shows it.")],
    configs: Configs = CONFIGS,
    artifacts: Artifacts = ARTIFACTS,
    target: Target = None,
    variant: Annotated[str | None, typer.Option(metavar="V", help="Variant, as in cpu-int8.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=99, help="Fresh processes per plan.")] = 3,
    json: AsJson = False,
) -> None:
    """Measure one trial of a model's search again, beside default ONNX Runtime."""
    from pipeline.cli.tuning_tables import build_again_table
    from pipeline.graph.build import plan_builds
    from pipeline.graph.tuning import find_search, measure_trial_again, read_search, tune_tasks

    task = find_search(tune_tasks(plan_builds(configs, artifacts, names=(name,), only=target)), variant)
    again = measure_trial_again(task, number, rounds=rounds, say=say)
    if json:
        write_json(encode(again))
        return
    record = read_search(task)
    write_table(build_again_table(record.trials[number], again, title=f"{name}/{task.id.variant}"))


@command
def show(
    name: Annotated[str, typer.Argument(help="Model, or path of a bundle.")],
    artifacts: Artifacts = ARTIFACTS,
    json: AsJson = False,
) -> None:
    """Show what a bundle is and what it achieves."""
    manifest = read_manifest(find_bundle(name, artifacts))
    if json:
        write_json(encode(manifest))
        return
    for line in describe_bundle(manifest):
        write_line(line)
    write_table(build_variants_table(manifest))
    for variant in manifest.variants:
        for measurement in variant.measurements:
            write_table(build_figures_table(measurement, title=f"{manifest.name} on {variant.name}"))


@command
def check(
    bundle: Annotated[Path, typer.Argument(help="Path of a bundle.")],
    golden: Annotated[bool, typer.Option(help="Also load every variant that this machine can run.")] = True,
) -> None:
    """Check a bundle: every byte against its record, and the golden sample's answers with every variant."""
    check_bundle(bundle)
    say(f"{bundle}: every file is as it was written")
    if golden:
        for checked in check_variants(bundle):
            say(f"{bundle}: {checked}")


@command
def schema() -> None:
    """Write the JSON Schema of a spec, for editors."""
    from pipeline.spec.schema import spec_schema

    write_json(spec_schema())


@command
def options(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Part of the names to list.")] = "",
    provider: Annotated[
        str | None, typer.Option(metavar="P", help="List these alone: session, cuda or cpu.")
    ] = None,
    onnxruntime: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Those of this ONNX Runtime; else the installed one's."),
    ] = None,
    json: AsJson = False,
) -> None:
    """List the options ONNX Runtime knows: values, default, effect, and since when."""
    from pipeline.cli.options_table import build_options_tables, encode_listing, list_options

    listing = list_options(provider, version=onnxruntime, part=name)
    for remark in listing.remarks:
        say(remark)
    if json:
        write_json(encode_listing(listing))
        return
    for table in build_options_tables(listing):
        write_table(table)


@command
def place(
    bundles: Annotated[list[str], typer.Argument(metavar="BUNDLE...", help="Models, or paths of bundles.")],
    artifacts: Artifacts = ARTIFACTS,
    devices: Devices = None,
    precision: Precision = FASTEST,
    json: AsJson = False,
) -> None:
    """Say which model a pool of these bundles would put on which device, and why."""
    from pipeline.cli.pool_tables import build_placement_table
    from pipeline.runtime.pool.devices import resolve_devices
    from pipeline.runtime.pool.loads import place_bundles

    found = [find_bundle(name, artifacts) for name in bundles]
    names = [path.resolve().name for path in found]
    paths = {
        name if names.count(name) == 1 else str(path): path for name, path in zip(names, found, strict=True)
    }
    check_choice("precision", precision, (FASTEST, *PRECISIONS))
    places = resolve_devices(devices or "all", read_hardware())
    loads, placement = place_bundles(paths, places, precision=precision)
    if json:
        write_json({"loads": encode(loads), "placement": encode(placement)})
        return
    write_table(build_placement_table(loads, placement))
    for reason in placement.reasons:
        write_line(reason)


@command
def serve_check(
    bundle: Annotated[str, typer.Argument(help="Model, or path of a bundle.")],
    artifacts: Artifacts = ARTIFACTS,
    devices: Devices = None,
    workers_per_device: Annotated[int, typer.Option(min=1, max=256, help="Processes on each.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="How many to make.")] = 1000,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Threads that make them.")] = 4,
    precision: Precision = FASTEST,
    json: AsJson = False,
) -> None:
    """Load a bundle on every device at once, drive it with its golden samples, and check every answer."""
    from pipeline.cli.pool_tables import build_workers_table, describe_drive
    from pipeline.runtime.pool.driving import drive_bundle

    result, stats = drive_bundle(
        find_bundle(bundle, artifacts),
        devices=devices or "all",
        workers_per_device=workers_per_device,
        requests=requests,
        clients=clients,
        precision=precision,
        observer=lambda event: say(f"{event.name}: {event.phase or event.state}"),
    )
    if json:
        write_json({"drive": encode(result), "pool": encode(stats)})
    else:
        write_table(build_workers_table(stats))
        for line in describe_drive(result):
            write_line(line)
    if result.wrong or result.failed:
        raise typer.Exit(1)


def find_bundle(name: str, artifacts: Path) -> Path:
    """Returns the bundle at a path, or of a model.

    Raises:
        BundleError: There is neither.
    """
    for path in (Path(name), artifacts / name):
        if (path / MANIFEST_FILE).is_file():
            return path
    models = [Path(name).name] if Path(name).name else []
    raise BundleError(
        f"no such bundle: {shlex.quote(name)}\n"
        f"  expected {MANIFEST_FILE} in {Path(name)} or in {artifacts / name}, got neither",
        hint=shlex.join(["ortprep", "prepare", *models]),
    )
