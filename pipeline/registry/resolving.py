"""What a reference names: asked of the registry or, where that cannot be reached, what it named last."""

from __future__ import annotations

import datetime
import logging

from pipeline.errors import BundleError, RegistryUnavailableError
from pipeline.registry.catalogue import Catalogue
from pipeline.registry.choosing import Wanted
from pipeline.registry.progress import Say
from pipeline.registry.records import Record, RecordName, decode_record
from pipeline.registry.references import Reference
from pipeline.registry.state import State, Version, fold, is_full_digest, resolve
from pipeline.spec.redaction import redact_url

log = logging.getLogger(__name__)


def resolve_online_or_last(wanted: Wanted, catalogue: Catalogue, say: Say) -> tuple[State, Version]:
    """Returns the version, from the registry, or from what it was last time where that is all there is.

    Raises:
        NotPublishedError: There is no such version.
        RegistryUnavailableError: The registry cannot be reached, and the reference was never resolved here.
        RegistryError: The registry failed in another way.
    """
    reference, url = wanted.reference, catalogue.backend.url
    if is_full_digest(reference.version) and wanted.verifier is None:
        known = _recall(catalogue, reference)
        if known is not None:
            return known[:2]  # a digest never comes to mean anything else
    try:
        state = catalogue.read_state(reference.name)
    except RegistryUnavailableError as error:
        known = _recall(catalogue, reference)
        if known is None:
            raise
        state, version, at = known
        line = f"{error.message.partition(chr(10))[0]}; using what {reference} was at {at}: {version.digest}"
        log.warning("%s", line)
        say(line)
        return state, version
    version = resolve(state, reference.version, registry=redact_url(url))
    names = [str(name) for name in records_of(state, version)]
    for text in {str(reference), f"{reference.name}@{version.digest}"}:
        catalogue.cache.remember(url, text, version.digest, tuple(names))
    return state, version


def records_of(state: State, version: Version) -> list[RecordName]:
    """Returns the names of the records it takes to use a version."""
    found = [RecordName("version", version.digest)]
    for digest in version.record.parts:
        found.append(RecordName("part", digest))
        found += [RecordName("signature", signature) for signature in state.signatures.get(digest, {})]
    return found


def _recall(catalogue: Catalogue, reference: Reference) -> tuple[State, Version, str] | None:
    known = catalogue.cache.recall(catalogue.backend.url, str(reference))
    if known is None:
        return None
    records: dict[RecordName, Record] = {}
    for text in known.records:
        name = RecordName.parse(text)
        data = None if name is None else catalogue.cache.read_record(name)
        if name is None or data is None:
            return None
        try:
            records[name] = decode_record(name, data)
        except BundleError:
            return None  # damaged here; the registry has it
    state = fold(reference.name, records)
    version = state.versions.get(known.version)
    at = datetime.datetime.fromtimestamp(known.at_s, datetime.UTC).isoformat(timespec="minutes")
    return None if version is None else (state, version, at)
