"""`publish`: a prepared bundle becomes part of a version that everyone sees.

The order is what makes it all or nothing: files first, then the record of the part, then that of the
version, which nothing names before, then its label. Killed anywhere, it leaves nothing that is visible and
incomplete, and going on uploads only what is not there yet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pipeline.bundle.loader_config import FileEntry
from pipeline.bundle.paths import is_safe_name
from pipeline.errors import ConflictError, RegistryError
from pipeline.registry.catalogue import Catalogue
from pipeline.registry.composition import Part
from pipeline.registry.parts import read_bundle_part
from pipeline.registry.progress import Meter, Observer, ignore
from pipeline.registry.records import (
    FULL_DIGEST,
    AliasRecord,
    ClaimRecord,
    LabelRecord,
    Record,
    RecordName,
    SignatureRecord,
    VersionRecord,
    record_digest,
)
from pipeline.registry.reservations import reserve
from pipeline.registry.signatures import Method, is_signed_by, sign_part, verify_part
from pipeline.registry.state import State, Version, merge_parts
from pipeline.registry.transfer import run_parallel

_ROUNDS = 20


@dataclass(frozen=True)
class Note:
    """What a publisher wants recorded with a version.

    Attributes:
        label: Human name of the version; None for the date and a number. Where an older version of the same
            source and spec has it, a number is added: `1.4-2`.
        by: Who publishes; "" records nobody.
        host: On which machine; "" records none.
    """

    label: str | None = None
    by: str = ""
    host: str = ""


@dataclass(frozen=True)
class Published:
    """What came of publishing.

    Attributes:
        part: Digest of the part.
        version: The version that the part belongs to now, or that took its place.
        uploaded_bytes: What had to be sent.
        total_bytes: What the bundle takes.
        is_new: Whether there was no such version before.
    """

    part: str
    version: Version
    uploaded_bytes: int
    total_bytes: int
    is_new: bool


def publish(
    bundle: Path,
    catalogue: Catalogue,
    *,
    note: Note | None = None,
    signer: Method | None = None,
    verifier: Method | None = None,
    repair: bool = False,
    observer: Observer = ignore,
) -> Published:
    """Publishes a bundle as a version, merged with what other machines published of the same source and spec.

    Args:
        bundle: The bundle's folder.
        catalogue: Where to.
        note: Label and provenance.
        signer: How to sign it; None leaves it unsigned.
        verifier: What signature it must have in the end.
        repair: Whether to upload files that the registry seems to have, too.
        observer: Told how it goes.

    Raises:
        BundleError: The bundle cannot be read; or, as IntegrityError, is not as it was written.
        SignatureError: The key cannot be used, or the signature that is required is not there.
        ConflictError: The label is another version's, or others publish without pause.
        RegistryError: The registry failed, or the label is no name.
    """
    note = note or Note()
    _check_label(note.label)
    part = read_bundle_part(bundle)
    record, model = part.record, part.record.model
    files = tuple(sorted({entry.sha256 for entry in record.files}))
    with reserve(catalogue, model, source=record.source, spec=record.spec, files=files):
        # Looked at only now: what a collection removes before would be taken for there.
        state = catalogue.read_state(model)
        _check_label_is_free(catalogue, part, note.label)
        signature = _sign(part, state, signer)
        if verifier is not None:
            signatures = (*_signatures(state, part), *((signature,) if signature else ()))
            verify_part(record, part.digest, signatures, verifier)
        uploaded = _upload(part, bundle, catalogue, observer, repair=repair)
        if signature is not None:
            catalogue.write_record(model, signature)
        version = _merge(part, catalogue)
        _name_version(catalogue, part, version, note)
        after = catalogue.mirror(model)
        if verifier is not None:
            verify_part(record, part.digest, _signatures(after, part), verifier)
    is_new = version not in state.versions
    return Published(part.digest, after.versions[version], uploaded, record.size_bytes, is_new)


def _sign(part: Part, state: State, signer: Method | None) -> SignatureRecord | None:
    """Returns a new signature, None where none is wanted, or the part has one that adds nothing."""
    if signer is None or is_signed_by(part.record, part.digest, _signatures(state, part), signer):
        return None
    return sign_part(part.record, part.digest, signer)


def _signatures(state: State, part: Part) -> tuple[SignatureRecord, ...]:
    return tuple(state.signatures.get(part.digest, {}).values())


def _check_label(label: str | None) -> None:
    if label is not None and (not is_safe_name(label) or len(label) > 100 or FULL_DIGEST.fullmatch(label)):
        raise RegistryError(
            f"no label: {label[:200]!r}\n"
            "  expected up to 100 letters, digits, '.', '_' and '-', a letter or digit first, and no digest"
        )


def _check_label_is_free(catalogue: Catalogue, part: Part, label: str | None) -> None:
    """Raises, before anything is uploaded, if a label is taken by a version of another source or spec."""
    if label is None:
        return
    records = catalogue.read_records(part.record.model)
    if any(isinstance(record, AliasRecord) and record.alias == label for record in records.values()):
        raise ConflictError(f"{label!r} is an alias of {part.record.model}\n  expected a label that is none")
    # A claimant that is gone may have been this very bundle; that is looked at again when it has a version.
    others = {
        version for version in _strangers(records, part, label) if RecordName("version", version) in records
    }
    if others:
        raise _label_taken(part.record.model, label, others)


def _strangers(records: Mapping[RecordName, Record], part: Part, label: str) -> set[str]:
    """Returns the versions that have or claim a label and are not of this source and spec."""
    family = {
        name.digest
        for name, record in records.items()
        if isinstance(record, VersionRecord)
        and (record.source, record.spec) == (part.record.source, part.record.spec)
    }
    return _claimants(records, label) - family


def _claimants(records: Mapping[RecordName, Record], label: str) -> set[str]:
    return {
        record.version
        for record in records.values()
        if isinstance(record, ClaimRecord | LabelRecord) and record.label == label
    }


def _label_taken(model: str, label: str, others: set[str]) -> ConflictError:
    return ConflictError(
        f"label taken: {model}@{label}\n"
        "  expected it to be free, or of this source and spec\n"
        f"  got it for {', '.join(sorted(others))}",
        hint="ortprep publish … --label ANOTHER   (a label never comes to mean other bytes)",
    )


def _upload(part: Part, bundle: Path, catalogue: Catalogue, observer: Observer, *, repair: bool) -> int:
    """Uploads what is missing and writes the part's record; returns the number of bytes sent."""
    backend, model = catalogue.backend, part.record.model
    everything = tuple({entry.sha256: entry for entry in part.record.files}.values())
    missing = everything if repair else backend.find_missing(model, part.record)
    if not missing and part.digest in catalogue.read_state(model).parts:
        return 0
    total = sum(entry.size_bytes for entry in missing)
    meter = Meter("upload", total, observer)

    def upload(entry: FileEntry) -> None:
        backend.upload_file(model, part.record, entry, bundle / entry.path, meter.add)

    # The largest first, so that none is left over when the others are done.
    run_parallel(upload, sorted(missing, key=lambda entry: -entry.size_bytes))
    backend.finish_part(model, part.record)
    catalogue.write_record(model, part.record)
    return total


def _merge(part: Part, catalogue: Catalogue) -> str:
    """Writes the version that has all parts of this source and spec; returns its digest.

    Who adds a part and then looks sees every part that was added before, so of several publishers at least
    the last one to look writes the version that has them all.
    """
    model, source, spec = part.record.model, part.record.source, part.record.spec
    state = catalogue.read_state(model)
    for _ in range(_ROUNDS):
        record = VersionRecord(model, source, spec, _choose_parts(part, state))
        digest = record_digest(record)
        if digest in state.versions:
            return digest
        catalogue.write_record(model, record)
        state = catalogue.read_state(model)
        if _choose_parts(part, state) == record.parts:
            return digest
    raise ConflictError(
        f"others publish {model} without pause\n  expected to be the last once in {_ROUNDS} times",
        hint="publish again: what was uploaded is kept",
    )


def _choose_parts(part: Part, state: State) -> tuple[str, ...]:
    """Returns the parts of the latest version or, if a newer bundle took this one's place, of one with it."""
    source, spec = part.record.source, part.record.spec
    latest = merge_parts(source, spec, state.parts)
    return latest if part.digest in latest else merge_parts(source, spec, state.parts, first=part.digest)


def _name_version(catalogue: Catalogue, part: Part, version: str, note: Note) -> None:
    """Gives a version its label: the wanted one, or a free one of today unless it has one.

    Where an older version of the same source and spec has the wanted label, as on the second of several
    machines that publish under one, a number is added: a label never moves.
    """
    model = part.record.model
    if note.label is not None:
        for number in range(1, _ROUNDS):
            label = note.label if number == 1 else f"{note.label}-{number}"
            others = _take_label(catalogue, part, version, note, label)
            if not others:
                return
            strangers = _strangers(catalogue.read_records(model), part, label) & others
            if strangers:
                raise _label_taken(model, label, strangers)
        raise ConflictError(
            f"no free label for {model}: {note.label}\n  got {_ROUNDS - 1} taken", hint="choose another"
        )
    today = datetime.now(UTC).date().isoformat()
    for _ in range(_ROUNDS):
        if catalogue.read_state(model).versions[version].labels:
            return
        label = f"{today}.{_next_number(catalogue, model, today)}"
        if not _take_label(catalogue, part, version, note, label):
            return
        time.sleep(random.uniform(0, 0.2))
    raise ConflictError(f"no free label for {model}\n  others publish it without pause", hint="publish again")


def _next_number(catalogue: Catalogue, model: str, day: str) -> int:
    records = catalogue.read_records(model).values()
    taken = [record.label for record in records if isinstance(record, ClaimRecord | LabelRecord)]
    taken += [record.alias for record in records if isinstance(record, AliasRecord)]
    numbers = [label.removeprefix(f"{day}.") for label in taken if label.startswith(f"{day}.")]
    return 1 + max((int(number) for number in numbers if number.isdecimal() and len(number) < 9), default=0)


def _take_label(catalogue: Catalogue, part: Part, version: str, note: Note, label: str) -> set[str]:
    """Makes `label` name `version`, for ever; returns the versions it stands back for, none if it does.

    A claim first, then a look: whoever sees the claim of another version stands back, so two can never both
    go on. At worst both stand back.
    """
    model = part.record.model
    if catalogue.read_state(model).labels.get(label) == version:
        return set()
    if not _claimants(catalogue.read_records(model), label) - {version}:
        catalogue.write_record(model, ClaimRecord(label, version))
    others = _claimants(catalogue.read_records(model), label) - {version}
    if not others:
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        catalogue.write_record(model, LabelRecord(label, version, now, note.by, note.host))
    return others
