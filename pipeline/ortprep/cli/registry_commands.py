"""The commands around registries: publish, pull, promote and what goes with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortprep.bundle.codec import encode
from ortprep.cli.command import ARTIFACTS, Artifacts, AsJson, Bundle, Output, command, find_bundle
from ortprep.cli.console import Block, Talk, echo
from ortprep.cli.progress import TransferBar
from ortprep.errors import RegistryError
from ortprep.spec.urls import redact_url
from ortprep.tables import Table, count_of, fill_table

if TYPE_CHECKING:
    from ortprep.registry.catalogue import Catalogue
    from ortprep.registry.documents import PartVariant, Version
    from ortprep.registry.garbage_collection import CollectResult
    from ortprep.registry.promotion import PromoteResult
    from ortprep.registry.versions import ModelState

Registry = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A folder, s3://…, gs://…, oci://HOST/PREFIX, mlflow+http://HOST:PORT; else $ORTPREP_REGISTRY.",
    ),
]
Verify = Annotated[
    Path | None,
    typer.Option(metavar="KEY", help="Refuse what is not signed with this: a public key's file."),
]
Sign = Annotated[
    Path | None, typer.Option(metavar="KEY", help="Sign with this: an elliptic-curve private key's file.")
]
NameAndVersion = Annotated[
    str,
    typer.Argument(
        metavar="NAME[@VERSION]", help="VERSION: an alias, a label or a digest; by default the latest."
    ),
]


@contextmanager
def _open(url: str | None) -> Iterator[Catalogue]:
    from ortprep.registry.catalogue import open_catalogue
    from ortprep.registry.references import default_registry

    with open_catalogue(url or default_registry()) as catalogue:
        yield catalogue


@command
def publish(
    bundle: Bundle,
    registry: Registry = None,
    artifacts: Artifacts = ARTIFACTS,
    label: Annotated[
        str | None, typer.Option(help="Name of the version; by default the date and some digits.")
    ] = None,
    sign: Sign = None,
    verify: Verify = None,
    json: AsJson = False,
) -> Output:
    """Publish a bundle to a registry, merged with what other machines published from the same source."""
    from ortprep.registry.publish import publish as publish_bundle

    with _open(registry) as catalogue, TransferBar() as bar:
        published = publish_bundle(
            find_bundle(bundle, artifacts),
            catalogue,
            label=label,
            private_key=sign,
            public_key=verify,
            observer=bar.show,
        )
    version = published.version
    sent = describe_transfer(published.uploaded_bytes, published.total_bytes, "uploaded")
    news = "" if published.is_new else "; nothing new"
    if label is not None and label != version.label:
        echo(f"already published as {version.label}; label {label} was not set")
    if published.superseded_by:
        echo(f"there is a more complete or newer version of the same source: {published.superseded_by}")
    return Output(
        encode_version(published),
        [f"{version.model}@{version.digest}", Talk(f"{version.model}@{version.label}: {sent}{news}")],
    )


def describe_transfer(moved_bytes: int, total_bytes: int, verb: str) -> str:
    """Returns how much was transferred, and how much did not need to be: `1.3 MB uploaded; …`."""
    text = f"{moved_bytes / 2**20:.1f} MB {verb}"
    rest_mb = f"{(total_bytes - moved_bytes) / 2**20:.1f}"
    return text if rest_mb == "0.0" else f"{text}; the other {rest_mb} MB were already there"


def encode_version(value: object) -> Any:
    """Returns a result as JSON types, without the documents themselves."""
    data = encode(value)
    for fields in (data, *data.values()):
        if isinstance(fields, dict):
            fields.pop("data", None)
    return data


@command
def pull(
    reference: NameAndVersion,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The bundle's folder.")],
    registry: Registry = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST", help="Part to pull, for another machine; by default the best for this one."
        ),
    ] = None,
    verify: Verify = None,
    json: AsJson = False,
) -> Output:
    """Download a version from a registry: the part that fits this machine best."""
    from ortprep.registry.pull import PullRequest
    from ortprep.registry.pull import pull as pull_version
    from ortprep.registry.references import parse_reference

    request = PullRequest(parse_reference(reference), part, verify)
    with _open(registry) as catalogue, TransferBar() as bar:
        pulled = pull_version(request, catalogue, out, observer=bar.show)
    size = describe_transfer(pulled.fetched_bytes, pulled.total_bytes, "fetched")
    return Output(
        encode(pulled) | {"path": str(pulled.path)},
        [
            str(pulled.path),
            Talk(f"{reference}: {pulled.version}, {', '.join(pulled.variants)}; {size}"),
        ],
    )


@command
def verify(
    bundle: Annotated[
        str,
        typer.Argument(metavar="BUNDLE", help="Path of a pulled bundle, or its name in artifacts."),
    ],
    key: Annotated[Path, typer.Option(help="A public key's file.")],
    artifacts: Artifacts = ARTIFACTS,
    json: AsJson = False,
) -> Output:
    """Check a pulled bundle against the signatures that it was published with."""
    from ortprep.registry.signatures import verify_bundle

    part = verify_bundle(find_bundle(bundle, artifacts), key)
    # What pulled.json says besides, the version for example, is not signed.
    return Output(
        {"model": part.model, "part": part.digest, "source": part.source, "spec": part.spec},
        [f"{bundle}: {part.model}, part {part.digest}, signed with {key}"],
    )


@command
def promote(
    reference: NameAndVersion,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias: production, candidate, ….")],
    registry: Registry = None,
    max_regression: Annotated[
        float,
        typer.Option(min=1.0, max=1000, help="How many times its current value a figure may be."),
    ] = 1.10,
    force: Annotated[bool, typer.Option("--force", help="Override the gate.")] = False,
    verify: Verify = None,
    json: AsJson = False,
) -> Output:
    """Point an alias to a version, unless it is unverified or `ortprep compare` finds it worse."""
    from ortprep.registry.promotion import PromotionGate
    from ortprep.registry.promotion import promote as move_alias
    from ortprep.registry.references import parse_reference

    gate = PromotionGate(max_regression, force, verify)
    with _open(registry) as catalogue:
        version = parse_reference(reference)
        moved = move_alias(version, alias, catalogue, gate=gate)
    return _show_moved(moved)


@command
def rollback(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a model.")],
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias.")],
    registry: Registry = None,
    json: AsJson = False,
) -> Output:
    """Point an alias to its previous version, once."""
    from ortprep.registry.promotion import rollback as roll_back

    with _open(registry) as catalogue:
        moved = roll_back(name, alias, catalogue)
    return _show_moved(moved)


def _show_moved(moved: PromoteResult) -> Output:
    """Returns where an alias is, where it was, and what objections were overridden."""
    version = moved.version
    blocks: list[Block] = [f"{version.model}@{moved.alias}: {version.label} {version.digest}"]
    if moved.before:
        blocks.append(Talk("unchanged" if moved.before == version.digest else f"before: {moved.before}"))
    blocks += [Talk(f"  overridden: {objection}") for objection in moved.forced]
    return Output(encode_version(moved), blocks)


@command
def list_(registry: Registry = None, json: AsJson = False) -> Output:
    """List the models of a registry."""
    with _open(registry) as catalogue:
        states = [catalogue.read_state(name) for name in catalogue.list_models()]
    return Output([_summary(state) for state in states], [_build_models_table(states)])


def _summary(state: ModelState) -> dict[str, Any]:
    return {
        "model": state.model,
        "versions": len(state.versions),
        "labels": state.labels,
        "aliases": dict(state.aliases),
    }


def _build_models_table(states: Iterable[ModelState]) -> Table:
    """Returns one row per model."""

    def aliases(state: ModelState) -> str:
        known = ((name, state.versions.get(digest)) for name, digest in state.aliases.items())
        return ", ".join(f"{name} → {version.label}" for name, version in known if version is not None)

    return fill_table(
        "models",
        states,
        (
            ("model", lambda state: state.model),
            ("latest", lambda state: state.latest().label if state.versions else None),
            ("aliases", aliases),
            ("versions", lambda state: len(state.versions)),
        ),
    )


@command
def versions(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a model.")],
    registry: Registry = None,
    json: AsJson = False,
) -> Output:
    """List the versions of a model and its aliases."""
    from ortprep.registry.versions import resolve

    with _open(registry) as catalogue:
        state = catalogue.read_state(name)
        resolve(state, None, registry=redact_url(catalogue.backend.url))
    data = _summary(state) | {
        "versions": [encode_version(version) for version in state.versions.values()],
        "superseded_by": state.superseded_by,
        "latest": state.latest().digest,
    }
    listed = (f"{name}@{version.digest}  {version.label}" for version in state.versions.values())
    return Output(data, [_build_versions_table(state), *listed])


def _build_versions_table(state: ModelState) -> Table:
    """Returns one row per version, the latest last."""

    def variant(one: PartVariant) -> str:
        return f"{one.name} on {one.hardware}" if one.hardware else one.name

    def aliases(version: Version) -> str:
        return ", ".join(name for name, digest in state.aliases.items() if digest == version.digest)

    return fill_table(
        state.model,
        state.versions.values(),
        (
            ("label", lambda one: f"{one.label}{' (superseded)' * (one.digest in state.superseded_by)}"),
            ("aliases", aliases),
            ("parts", lambda one: "; ".join(", ".join(map(variant, part.variants)) for part in one.parts)),
            ("published", lambda one: one.published_at[:16]),
            ("MB", lambda one: sum(part.size_bytes for part in one.parts) / 2**20),
        ),
    )


@command
def gc(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Models; all by default.")] = None,
    registry: Registry = None,
    keep_latest: Annotated[int, typer.Option(min=0, help="Number of latest versions to keep.")] = 3,
    keep_days: Annotated[
        float, typer.Option(min=0, max=36_500, help="Keep versions younger than this, in days.")
    ] = 30,
    grace_hours: Annotated[
        float,
        typer.Option(min=0, max=10_000, help="Keep what was uploaded within this many hours."),
    ] = 24,
    delete: Annotated[bool, typer.Option("--delete", help="Remove them; by default only list them.")] = False,
    json: AsJson = False,
) -> Output:
    """List the versions that neither an alias nor the policy keeps; --delete removes them."""
    from ortprep.registry.garbage_collection import RetentionPolicy, collect

    policy = RetentionPolicy(keep_latest, keep_days, grace_hours)
    with _open(registry) as catalogue:
        models = catalogue.list_models()
        unknown = [name for name in names or () if name not in models]
        if unknown:
            raise RegistryError(
                f"no such model: {', '.join(unknown)}\n  expected some of {', '.join(models) or 'none'}"
            )
        collected = [collect(name, catalogue, policy=policy, dry_run=not delete) for name in names or models]
    data = [encode(result) | {"versions": [one.digest for one in result.versions]} for result in collected]
    return Output(data, _describe_collected(collected, what="removed" if delete else "would remove"))


def _describe_collected(collected: Iterable[CollectResult], *, what: str) -> Iterator[Block]:
    """Yields what was removed of each model, and how to remove what was only listed."""
    for result in collected:
        swept = result.swept
        files = f"{count_of(swept.files, 'file')} of {swept.size_bytes / 2**20:.1f} MB"
        counts = f"{count_of(len(result.versions), 'version')}, {count_of(len(swept.parts), 'part')}, {files}"
        yield f"{result.model}: {what} {counts}; keeps {result.kept}"
        yield from (f"  {version.label} {version.digest}" for version in result.versions)
    if what != "removed":
        yield Talk("nothing was removed; --delete removes these")
