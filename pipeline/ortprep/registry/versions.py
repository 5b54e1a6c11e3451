"""Versions, labels and aliases of a model. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ortprep.bundle.digest import PREFIX
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import ConflictError, NotPublishedError, RegistryError
from ortprep.quoting import quoted
from ortprep.registry.documents import FULL_DIGEST, LIKE_DIGEST, PartSummary, Version


def is_alias_name(name: str) -> bool:
    """Says whether something can be a label or an alias: up to 60 characters, and not like a digest."""
    return is_safe_name(name) and len(name) <= 60 and not LIKE_DIGEST.fullmatch(name)


def check_alias_name(name: str, *, called: str = "alias name") -> None:
    """Raises RegistryError unless a name can be a label or an alias."""
    if not is_alias_name(name):
        raise RegistryError(
            f"invalid {called}: {name[:200]!r}\n"
            "  expected up to 60 letters, digits, '.', '_' and '-', starting with a letter or digit, "
            "and with another character if it has 7 or more hexadecimal digits, as digests do"
        )


def check_model_name(name: str) -> str:
    """Returns a model's name; raises RegistryError if it is invalid."""
    if not is_safe_name(name):
        raise RegistryError(f"invalid model name: {name[:80]!r}\n  expected letters, digits, '.', '_', '-'")
    return name


@dataclass(frozen=True)
class ModelState:
    """The state of a model in a registry.

    Attributes:
        versions: Its versions by digest, the first published first.
        aliases: Digest of the version that each alias names; that version may be gone.
        superseded_by: Digest of the latest version of the same source and spec, by that of an older one.
    """

    model: str
    versions: Mapping[str, Version]
    aliases: Mapping[str, str]
    superseded_by: Mapping[str, str]

    def holders(self, label: str) -> tuple[Version, ...]:
        """Returns the latest version with a label of each source and spec; more than one is an error."""
        held = [version for version in self.versions.values() if version.label == label]
        ranked = sorted(held, key=lambda version: version.digest not in self.superseded_by)
        return tuple({version.family: version for version in ranked}.values())

    def latest(self) -> Version:
        """Returns the version published last that nothing superseded; there is at least one version."""
        return [version for digest, version in self.versions.items() if digest not in self.superseded_by][-1]

    @property
    def labels(self) -> dict[str, str]:
        """Digests of the versions that labels name; one that names several has the first of them."""
        labels = dict.fromkeys(version.label for version in self.versions.values())
        return {label: self.holders(label)[0].digest for label in labels}


def build_state(model: str, versions: Iterable[Version], aliases: Mapping[str, str]) -> ModelState:
    """Returns the state that versions and aliases make, whatever their order."""
    ordered = sorted(versions, key=lambda version: (version.published_at, version.digest))
    by_digest = {version.digest: version for version in ordered}
    families: dict[tuple[str, str], list[Version]] = {}
    for version in by_digest.values():
        families.setdefault(version.family, []).append(version)
    superseded = {old: new for family in families.values() for old, new in _find_superseded(family)}
    return ModelState(model, by_digest, dict(sorted(aliases.items())), superseded)


def _find_superseded(family: Sequence[Version]) -> Iterator[tuple[str, str]]:
    merged = frozenset(
        part.digest for part in merge_parts(part for version in family for part in version.parts)
    )
    latest = next((version for version in family if version.part_digests == merged), None)
    for version in family:
        if latest is not None and version is not latest:
            yield version.digest, latest.digest


def merge_parts(parts: Iterable[PartSummary], *, first: str = "") -> tuple[PartSummary, ...]:
    """Returns the parts that make up the latest version of a source and spec.

    Of each machine it is the part that was prepared last: a variant that it does not have was refused or of
    no use. All publishers get the same result, whatever the order.

    The part with the digest `first` counts as prepared last, for the publisher of an older bundle.
    """
    chosen: dict[str, PartSummary] = {}
    for part in sorted(
        parts, key=lambda part: (part.digest == first, part.created_at, part.digest), reverse=True
    ):
        chosen.setdefault(part.built_on, part)
    return tuple(sorted(chosen.values(), key=lambda part: part.digest))


def is_published(state: ModelState, name: str | None) -> bool:
    """Returns whether anything has the name that `resolve` takes; an alias of a lost version counts."""
    if name is None:
        return bool(state.versions)
    return name in state.aliases or name in state.labels or FULL_DIGEST.fullmatch(name) is not None


def resolve(state: ModelState, name: str | None, *, registry: str) -> Version:
    """Returns the version that a user names.

    `name` is an alias, a label or a version's whole digest; None is the latest version.

    Raises:
        NotPublishedError: No version has that name.
        ConflictError: Versions of several sources or specs claim that label, or an alias has its name and
            names another version.
    """
    if not state.versions:
        raise NotPublishedError(
            f"no such model: {state.model} in {registry}\n  expected a published version, got none",
            hint=f"ortprep list --registry {quoted(registry)}",
        )
    if name is None:
        return state.latest()
    if FULL_DIGEST.fullmatch(name):
        digests = {PREFIX + name.removeprefix(PREFIX)}
    else:
        digests = {holder.digest for holder in state.holders(name)}
        digests |= {state.aliases[name]} if name in state.aliases else set()
    if len(digests) > 1:
        raise ConflictError(
            f"more than one version is called {state.model}@{name} in {registry}\n"
            f"  expected one, got {', '.join(sorted(digests))}",
            hint=f"ortprep versions {quoted(state.model)} --registry {quoted(registry)}   (name a digest)",
        )
    version = state.versions.get(next(iter(digests), ""))
    if version is None:
        got = f"{next(iter(digests))}, which does not exist" if digests else "none"
        raise NotPublishedError(
            f"no such version: {state.model}@{name} in {registry}\n"
            f"  expected an alias, a label, or a whole digest, got {got}",
            hint=f"ortprep versions {quoted(state.model)} --registry {quoted(registry)}",
        )
    return version
