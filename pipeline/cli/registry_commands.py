"""The commands around registries: publish, pull, promote and what goes with them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortprep.bundle.codec import encode
from ortprep.cli.command import ARTIFACTS, Artifacts, AsJson, Bundle, command, find_bundle
from ortprep.cli.console import TransferBar, echo, write_json, write_line, write_table
from ortprep.errors import RegistryError

if TYPE_CHECKING:
    from ortprep.registry.catalogue import Catalogue
    from ortprep.registry.promotion import PromoteResult
    from ortprep.registry.publish import PublishResult
    from ortprep.registry.versions import ModelState

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
Sign = Annotated[
    str | None,
    typer.Option(
        metavar="KEY", help="Sign it: a private key's file, or KIND:option=value,… of model-signing."
    ),
]
NameAndVersion = Annotated[
    str,
    typer.Argument(metavar="NAME[@VERSION]", help="VERSION: an alias, a label or a digest; else the latest."),
]


def _registry(url: str | None) -> str:
    from ortprep.registry.references import default_registry

    return url or default_registry()


@command
def publish(
    bundle: Bundle,
    registry: Registry = None,
    artifacts: Artifacts = ARTIFACTS,
    label: Annotated[
        str | None, typer.Option(help="Human name of the version; else the date and some digits.")
    ] = None,
    sign: Sign = None,
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
    from ortprep.registry.catalogue import open_catalogue
    from ortprep.registry.documents import check_alias_name
    from ortprep.registry.promotion import PromotionGate
    from ortprep.registry.promotion import promote as move_alias
    from ortprep.registry.publish import publish as publish_bundle
    from ortprep.registry.references import VersionRef
    from ortprep.registry.signature_methods import parse_signer, parse_verifier

    signer = None if sign is None else parse_signer(sign)
    verifier = None if verify is None else parse_verifier(verify)
    if alias is not None:
        check_alias_name(alias)
    with open_catalogue(_registry(registry)) as catalogue, TransferBar() as bar:
        published = publish_bundle(
            find_bundle(bundle, artifacts),
            catalogue,
            label=label,
            by=by,
            host=socket.gethostname() if record_host else "",
            signer=signer,
            verifier=verifier,
            repair=repair,
            observer=bar.show,
        )
        _tell_published(published, label, json=json)
        if alias is not None:
            version = published.version
            reference, gate = VersionRef(version.model, version.digest), PromotionGate(verifier=verifier)
            move_alias(reference, alias, catalogue, gate=gate, by=by, signer=signer)
            echo(f"{version.model}@{alias}: {version.digest}")


def _tell_published(published: PublishResult, label: str | None, *, json: bool) -> None:
    version = published.version
    if json:
        write_json(encode_version(published))
    else:
        write_line(f"{version.model}@{version.digest}")
        sent = f"{published.uploaded_bytes / 2**20:.1f} of {published.total_bytes / 2**20:.1f} MB uploaded"
        echo(f"{version.model}@{version.label}: {sent}{'' if published.is_new else '; nothing new'}")
    if label is not None and label != version.label:
        echo(f"{label} names another version of the same source, and goes on to: this one is {version.label}")
    if published.superseded_by:
        echo(f"there is a more complete or newer version of the same source: {published.superseded_by}")


def encode_version(value: object) -> Any:
    """Returns a result as JSON types, without the documents themselves."""
    data = encode(value)
    for found in (data, *data.values()):
        if isinstance(found, dict):
            found.pop("data", None)
    return data


@command
def pull(
    reference: NameAndVersion,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The bundle's folder.")],
    registry: Registry = None,
    part: Annotated[
        str | None,
        typer.Option(metavar="DIGEST", help="This part, for another machine; else what fits this one best."),
    ] = None,
    verify: Verify = None,
    json: AsJson = False,
) -> None:
    """Pull a version from a registry: the part of it that fits this machine best, byte for byte."""
    from ortprep.registry.catalogue import open_catalogue
    from ortprep.registry.pull import PullRequest
    from ortprep.registry.pull import pull as pull_version
    from ortprep.registry.references import parse_reference
    from ortprep.registry.signature_methods import parse_verifier

    verifier = None if verify is None else parse_verifier(verify)
    request = PullRequest(parse_reference(reference), part, verifier)
    with open_catalogue(_registry(registry)) as catalogue, TransferBar() as bar:
        pulled = pull_version(request, catalogue, out, observer=bar.show, say=echo)
    if json:
        write_json(encode(pulled) | {"path": str(pulled.path)})
        return
    write_line(str(pulled.path))
    size = f"{pulled.fetched_bytes / 2**20:.1f} of {pulled.total_bytes / 2**20:.1f} MB fetched"
    echo(f"{reference}: {pulled.version}, {', '.join(pulled.variants)}; {size}")
    for digest, reason in pulled.left_out.items():
        echo(f"  left out part {digest}: {reason}")


@command
def verify(
    bundle: Annotated[
        str, typer.Argument(help="Path of a bundle that was pulled, or its name in artifacts.")
    ],
    key: Annotated[str, typer.Option(help="A public key's file, or KIND:option=value,… of model-signing.")],
    artifacts: Artifacts = ARTIFACTS,
    json: AsJson = False,
) -> None:
    """Check every byte of a pulled bundle against the signatures it was published with."""
    from ortprep.registry.receipt import verify_bundle
    from ortprep.registry.signature_methods import describe_method, parse_verifier

    method = parse_verifier(key)
    receipt = verify_bundle(find_bundle(bundle, artifacts), method)
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
        typer.Option(min=1.0, max=1000, help="How many times worse a figure may be than now."),
    ] = 1.10,
    across_hardware: Annotated[
        bool, typer.Option("--across-hardware", help="Compare figures from different hardware all the same.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overrule the gate; needs --reason.")] = False,
    verify: Verify = None,
    sign: Sign = None,
    reason: Reason = "",
    by: By = "",
    json: AsJson = False,
) -> None:
    """Make an alias name a version that was verified, and in which `ortprep compare` finds nothing worse."""
    from ortprep.registry.catalogue import open_catalogue
    from ortprep.registry.promotion import PromotionGate
    from ortprep.registry.promotion import promote as move_alias
    from ortprep.registry.references import parse_reference
    from ortprep.registry.signature_methods import parse_signer, parse_verifier

    verifier = None if verify is None else parse_verifier(verify)
    gate = PromotionGate(max_regression, force, across_hardware, verifier)
    signer = None if sign is None else parse_signer(sign)
    with open_catalogue(_registry(registry)) as catalogue:
        wanted = parse_reference(reference)
        moved = move_alias(wanted, alias, catalogue, gate=gate, reason=reason, by=by, signer=signer)
    _tell_moved(moved, json=json)


@command
def rollback(
    name: Annotated[str, typer.Argument(help="Model.")],
    alias: Annotated[str, typer.Argument(help="The alias.")],
    registry: Registry = None,
    sign: Sign = None,
    reason: Reason = "",
    by: By = "",
    json: AsJson = False,
) -> None:
    """Make an alias name what it named before."""
    from ortprep.registry.catalogue import open_catalogue
    from ortprep.registry.promotion import rollback as roll_back
    from ortprep.registry.signature_methods import parse_signer

    signer = None if sign is None else parse_signer(sign)
    with open_catalogue(_registry(registry)) as catalogue:
        moved = roll_back(name, alias, catalogue, reason=reason, by=by, signer=signer)
    _tell_moved(moved, json=json)


def _tell_moved(moved: PromoteResult, *, json: bool) -> None:
    if json:
        write_json(encode_version(moved))
        return
    version = moved.version
    write_line(f"{version.model}@{moved.alias}: {version.label} {version.digest}")
    if moved.before:
        echo("unchanged" if moved.before == version.digest else f"before: {moved.before}")
    for objection in moved.forced:
        echo(f"  overruled: {objection}")


@command
def list_(registry: Registry = None, json: AsJson = False) -> None:
    """List the models of a registry."""
    from ortprep.cli.registry_tables import build_models_table
    from ortprep.registry.catalogue import open_catalogue

    with open_catalogue(_registry(registry)) as catalogue:
        states = [catalogue.read_state(name) for name in catalogue.backend.list_models()]
    if json:
        write_json([_summary(state) for state in states])
    else:
        write_table(build_models_table(states))


def _summary(state: ModelState) -> dict[str, Any]:
    return {
        "model": state.model,
        "versions": len(state.versions),
        "labels": {label: claims[0].digest for label, claims in state.labels().items()},
        "aliases": dict(state.aliases),
    }


@command
def versions(
    name: Annotated[str, typer.Argument(help="Model.")], registry: Registry = None, json: AsJson = False
) -> None:
    """List the versions of a model, and where its aliases have been."""
    from ortprep.cli.registry_tables import build_moves_table, build_versions_table
    from ortprep.registry.catalogue import open_catalogue
    from ortprep.registry.versions import resolve

    url = _registry(registry)
    with open_catalogue(url) as catalogue:
        state = catalogue.read_state(name)
        resolve(state, None, registry=url)
        recorded = catalogue.read_moves(name, state.versions.values())
        moves = [move for found in recorded.values() for move in found]
        signed = {} if json else _count_signed(catalogue, state)
    if json:
        found = [encode_version(version) for version in state.versions.values()]
        data = _summary(state) | {"versions": found, "superseded_by": dict(state.superseded_by)}
        write_json(data | {"latest": state.latest().digest, "moves": [encode(move) for move in moves]})
        return
    write_table(build_versions_table(state, signed))
    for version in state.versions.values():
        write_line(f"{name}@{version.digest}  {version.label}")
    if moves:
        write_table(build_moves_table(state, moves))


def _count_signed(catalogue: Catalogue, state: ModelState) -> dict[str, int]:
    """Returns how many parts of each version have a signature, by any key."""
    counts = {}
    for version in state.versions.values():
        parts = [catalogue.read_part(state.model, part.digest) for part in version.parts]
        counts[version.digest] = sum(bool(catalogue.read_signatures(part)) for part in parts)
    return counts


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
    grace_hours: Annotated[
        float,
        typer.Option(min=0, max=10_000, help="Keep what was uploaded in the last so many hours."),
    ] = 24,
    delete: Annotated[bool, typer.Option("--delete", help="Do it; else only say what would go.")] = False,
    json: AsJson = False,
) -> None:
    """Say which versions neither an alias nor the policy keeps, or remove them."""
    from ortprep.cli.registry_tables import describe_collected
    from ortprep.registry.catalogue import open_catalogue
    from ortprep.registry.garbage_collection import RetentionPolicy, collect

    policy = RetentionPolicy(keep_latest, keep_days, grace_hours)
    with open_catalogue(_registry(registry)) as catalogue:
        known = catalogue.backend.list_models()
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise RegistryError(
                f"no such model: {', '.join(unknown)}\n  expected some of {', '.join(known) or 'none at all'}"
            )
        collected = [collect(name, catalogue, policy=policy, dry_run=not delete) for name in names or known]
    if json:
        write_json([encode(one) | {"versions": [v.digest for v in one.versions]} for one in collected])
        return
    for one in collected:
        for line in describe_collected(one, done=delete):
            write_line(line)
    if not delete:
        echo("nothing was removed; --delete does it")
