"""The commands around registries: publish, pull, promote and what goes with them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.bundle.codec import encode
from pipeline.cli.app import ARTIFACTS, Artifacts, AsJson, command, find_bundle
from pipeline.cli.console import TransferBar, say, write_json, write_line, write_table
from pipeline.errors import RegistryError

if TYPE_CHECKING:
    from pipeline.registry.promotion import Moved
    from pipeline.registry.publishing import Published
    from pipeline.registry.state import State, Version

Registry = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A folder, an fsspec URL, oci://HOST/PREFIX or mlflow+http://HOST:PORT; else $ORTPREP_REGISTRY.",
    ),
]
By = Annotated[str, typer.Option(metavar="TEXT", help="Who does this; recorded for all to see.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why; recorded for all to see.")]
Verify = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Refuse what is not signed so: a public key's file, or KIND:option=value,… of model-signing.",
    ),
]
NameAndVersion = Annotated[
    str,
    typer.Argument(metavar="NAME[@VERSION]", help="VERSION: an alias, a label or a digest; else the latest."),
]


def _registry(url: str | None) -> str:
    from pipeline.registry.references import default_registry

    return url or default_registry()


@command
def publish(
    bundle: Annotated[str, typer.Argument(help="Model, or path of a bundle.")],
    registry: Registry = None,
    artifacts: Artifacts = ARTIFACTS,
    label: Annotated[
        str | None, typer.Option(help="Human name of the version; else the date and a number.")
    ] = None,
    sign: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Sign it: a private key's file, or KIND:option=value,… of model-signing."
        ),
    ] = None,
    verify: Verify = None,
    alias: Annotated[
        str | None, typer.Option(help="Promote it to this alias at once, if the gate lets it pass.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Upload files that the registry seems to have, too.")
    ] = False,
    by: By = "",
    record_host: Annotated[
        bool, typer.Option("--record-host", help="Record this machine's name for all to see.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Publish a bundle to a registry, merged with what other machines published of the same source."""
    from pipeline.registry.catalogue import open_catalogue
    from pipeline.registry.promotion import check_alias
    from pipeline.registry.promotion import promote as move_alias
    from pipeline.registry.publishing import Note
    from pipeline.registry.publishing import publish as publish_bundle
    from pipeline.registry.references import Reference
    from pipeline.registry.signatures import parse_signer, parse_verifier

    note = Note(label, by, socket.gethostname() if record_host else "")
    if alias is not None:
        check_alias(alias)
    with open_catalogue(_registry(registry)) as catalogue, TransferBar() as bar:
        published = publish_bundle(
            find_bundle(bundle, artifacts),
            catalogue,
            note=note,
            signer=None if sign is None else parse_signer(sign),
            verifier=None if verify is None else parse_verifier(verify),
            repair=repair,
            observer=bar.show,
        )
        _tell_published(published, label, json=json)
        if alias is not None:
            version = published.version
            moved = move_alias(Reference(version.record.model, version.digest), alias, catalogue, by=by)
            say(f"{version.record.model}@{moved.alias.name}: {version.digest}")


def _tell_published(published: Published, label: str | None, *, json: bool) -> None:
    version = published.version
    model, labels = version.record.model, ", ".join(version.labels)
    if json:
        write_json(encode(published))
    else:
        write_line(f"{model}@{version.digest}")
        sent = f"{published.uploaded_bytes / 2**20:.1f} of {published.total_bytes / 2**20:.1f} MB uploaded"
        say(f"{model}@{labels}: {sent}{'' if published.is_new else '; nothing new'}")
    if label is not None and label not in version.labels:
        say(f"{label} names an earlier version of the same source, and goes on to: this one is {labels}")
    _tell_superseded(version)


def _tell_superseded(version: Version) -> None:
    if version.superseded_by:
        say(f"there is a more complete or newer version of the same source: {version.superseded_by}")


@command
def pull(
    reference: NameAndVersion,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The bundle's folder.")],
    registry: Registry = None,
    variants: Annotated[
        str, typer.Option(help="usable (on this machine), all, or names and targets with commas.")
    ] = "usable",
    verify: Verify = None,
    json: AsJson = False,
) -> None:
    """Pull a version from a registry: what this machine can use of it."""
    from pipeline.registry.catalogue import open_catalogue
    from pipeline.registry.choosing import Wanted
    from pipeline.registry.pulling import pull as pull_version
    from pipeline.registry.references import parse_reference
    from pipeline.registry.signatures import parse_verifier

    names = tuple(name.strip() for name in variants.split(",") if name.strip())
    if not names:
        raise typer.BadParameter("expected usable, all, or names", param_hint="--variants")
    wanted = Wanted(parse_reference(reference), names, None if verify is None else parse_verifier(verify))
    with open_catalogue(_registry(registry)) as catalogue, TransferBar() as bar:
        pulled = pull_version(wanted, catalogue, out, observer=bar.show, say=say)
    if json:
        write_json(encode(pulled) | {"path": str(pulled.path)})
        return
    write_line(str(pulled.path))
    size = f"{pulled.fetched_bytes / 2**20:.1f} of {pulled.total_bytes / 2**20:.1f} MB fetched"
    say(f"{reference}: {pulled.version}, {', '.join(pulled.variants)}; {size}")
    for name, reason in pulled.left_out.items():
        say(f"  left out {name}: {reason}")


@command
def verify(
    bundle: Annotated[Path, typer.Argument(help="A bundle that was pulled.")],
    key: Annotated[str, typer.Option(help="A public key's file, or KIND:option=value,… of model-signing.")],
    json: AsJson = False,
) -> None:
    """Check every byte of a pulled bundle against the signatures it was published with."""
    from pipeline.registry.receipt import verify_bundle
    from pipeline.registry.signatures import describe_method, parse_verifier

    method = parse_verifier(key)
    receipt = verify_bundle(bundle, method)
    if json:
        write_json(encode(receipt))
        return
    write_line(f"{bundle}: {receipt.version}, signed by {describe_method(method)}")


@command
def promote(
    reference: NameAndVersion,
    alias: Annotated[str, typer.Argument(help="The alias: production, candidate, ….")],
    registry: Registry = None,
    max_regression: Annotated[
        float,
        typer.Option(min=0.1, max=1000, help="How much longer init and steady runs may take than now."),
    ] = 1.10,
    force: Annotated[bool, typer.Option("--force", help="Overrule the gate; needs --reason.")] = False,
    reason: Reason = "",
    by: By = "",
    json: AsJson = False,
) -> None:
    """Make an alias name a version, if it was verified and is not slower than what the alias names now."""
    from pipeline.registry.catalogue import open_catalogue
    from pipeline.registry.promotion import Gate
    from pipeline.registry.promotion import promote as move_alias
    from pipeline.registry.references import parse_reference

    gate = Gate(max_regression, force)
    with open_catalogue(_registry(registry)) as catalogue:
        moved = move_alias(parse_reference(reference), alias, catalogue, gate=gate, reason=reason, by=by)
    _tell_moved(moved, json=json)


@command
def rollback(
    name: Annotated[str, typer.Argument(help="Model.")],
    alias: Annotated[str, typer.Argument(help="The alias.")],
    registry: Registry = None,
    reason: Reason = "",
    by: By = "",
    json: AsJson = False,
) -> None:
    """Make an alias name what it named before."""
    from pipeline.registry.catalogue import open_catalogue
    from pipeline.registry.promotion import rollback as roll_back

    with open_catalogue(_registry(registry)) as catalogue:
        moved = roll_back(name, alias, catalogue, reason=reason, by=by)
    _tell_moved(moved, json=json)


def _tell_moved(moved: Moved, *, json: bool) -> None:
    if json:
        write_json(encode(moved))
        return
    version = moved.version
    write_line(f"{version.record.model}@{moved.alias.name}: {', '.join(version.labels)} {version.digest}")
    if moved.before:
        say("unchanged" if moved.before == version.digest else f"before: {moved.before}")
    for objection in moved.forced:
        say(f"  overruled: {objection}")
    _tell_superseded(version)


@command
def list_(registry: Registry = None, json: AsJson = False) -> None:
    """List the models of a registry."""
    from pipeline.cli.registry_tables import build_models_table
    from pipeline.registry.catalogue import open_catalogue

    with open_catalogue(_registry(registry)) as catalogue:
        states = [catalogue.read_state(name) for name in catalogue.backend.list_models()]
    if json:
        write_json([_summary(state) for state in states])
    else:
        write_table(build_models_table(states))


def _summary(state: State) -> dict[str, Any]:
    return {
        "model": state.model,
        "versions": len(state.versions),
        "labels": state.labels,
        "aliases": {name: alias.version for name, alias in state.aliases.items()},
    }


@command
def versions(
    name: Annotated[str, typer.Argument(help="Model.")], registry: Registry = None, json: AsJson = False
) -> None:
    """List the versions of a model, and where its aliases have been."""
    from pipeline.cli.registry_tables import build_moves_table, build_versions_table
    from pipeline.registry.catalogue import open_catalogue
    from pipeline.registry.state import latest_version, resolve

    url = _registry(registry)
    with open_catalogue(url) as catalogue:
        state = catalogue.read_state(name)
    resolve(state, None, registry=url)
    if json:
        write_json(encode(state) | {"latest": latest_version(state).digest})
        return
    write_table(build_versions_table(state))
    if state.aliases:
        write_table(build_moves_table(state))


@command
def gc(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Models; all if none is named.")
    ] = None,
    registry: Registry = None,
    keep_latest: Annotated[int, typer.Option(min=0, help="Keep so many of the latest versions.")] = 3,
    keep_days: Annotated[
        float, typer.Option(min=0, max=36_500, help="Keep what is younger than so many days.")
    ] = 30,
    delete: Annotated[bool, typer.Option("--delete", help="Do it; else only say what would go.")] = False,
    json: AsJson = False,
) -> None:
    """Say which versions neither an alias nor the policy keeps, or remove them."""
    from pipeline.cli.registry_tables import describe_collected
    from pipeline.registry.catalogue import open_catalogue
    from pipeline.registry.collection import Policy, collect

    policy = Policy(keep_latest, keep_days)
    with open_catalogue(_registry(registry)) as catalogue:
        known = catalogue.backend.list_models()
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise RegistryError(
                f"no such model: {', '.join(unknown)}\n  expected some of {', '.join(known) or 'none at all'}"
            )
        collected = [collect(name, catalogue, policy=policy, dry_run=not delete) for name in names or known]
    if json:
        write_json([encode(one) for one in collected])
        return
    for one in collected:
        for line in describe_collected(one, done=delete):
            write_line(line)
    if not delete:
        say("nothing was removed; --delete does it")
