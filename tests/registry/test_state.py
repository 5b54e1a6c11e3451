"""Laws of what records mean; no registry, no disk."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bundle.digest import digest_bytes
from pipeline.bundle.loader_config import FileEntry
from pipeline.errors import BundleError, IntegrityError, NotPublishedError, UnsupportedVersionError
from pipeline.registry.records import (
    AliasRecord,
    LabelRecord,
    PartRecord,
    PartVariant,
    Record,
    RecordName,
    VersionRecord,
    decode_record,
    encode_record,
    file_records,
    record_digest,
)
from pipeline.registry.state import fold, latest_version, merge_parts, resolve

SOURCE, SPEC = digest_bytes(b"source"), digest_bytes(b"spec")


def part(number: int, *variants: str, day: int = 1) -> PartRecord:
    described = tuple(PartVariant(name, "cpu", "1.31", ("CPU",), name) for name in variants)
    entry = FileEntry("loader.json", number, digest_bytes(str(number).encode()))
    return PartRecord("net", SOURCE, SPEC, f"2026-11-{day:02}", (entry,), described)


def version(*parts: PartRecord) -> VersionRecord:
    return VersionRecord("net", SOURCE, SPEC, tuple(sorted(record_digest(one) for one in parts)))


def move(sequence: int, to: VersionRecord, action: str = "promote") -> AliasRecord:
    return AliasRecord("production", action, record_digest(to), sequence, f"t{sequence}")


variants = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)
families = st.lists(st.tuples(variants, st.integers(1, 9)), min_size=1, max_size=6)


@given(families, st.randoms(use_true_random=False))
def test_the_order_in_which_records_are_seen_means_nothing(
    family: list[tuple[list[str], int]], order: random.Random
) -> None:
    parts = [part(i, *names, day=day) for i, (names, day) in enumerate(family)]
    records: list[Record] = [*parts]
    for end in range(1, len(parts) + 1):
        record = version(*parts[:end])
        records += [record, LabelRecord(f"v{end}", record_digest(record), f"t{end}"), move(end, record)]
    shuffled = records * 2
    order.shuffle(shuffled)
    assert fold("net", file_records(shuffled)) == fold("net", file_records(records))


@given(families)
def test_merging_leaves_every_variant_of_every_publisher(family: list[tuple[list[str], int]]) -> None:
    parts = {
        record_digest(one): one for one in (part(i, *names, day=day) for i, (names, day) in enumerate(family))
    }
    merged = merge_parts(SOURCE, SPEC, parts)
    offered = {variant for one in parts.values() for variant in one.variants}
    assert {variant for digest in merged for variant in parts[digest].variants} == offered
    assert merged == merge_parts(SOURCE, SPEC, {digest: parts[digest] for digest in reversed(parts)})


def test_a_part_prepared_again_takes_the_place_of_the_older_one() -> None:
    old, new, other = part(1, "a", day=1), part(2, "a", day=2), part(3, "b", day=1)
    parts = {record_digest(one): one for one in (old, new, other)}
    assert set(merge_parts(SOURCE, SPEC, parts)) == {record_digest(new), record_digest(other)}


def test_a_version_without_all_its_parts_is_not_visible() -> None:
    one, two = part(1, "a"), part(2, "b")
    both = version(one, two)
    assert fold("net", file_records([one, both])).versions == {}
    assert set(fold("net", file_records([one, two, both])).versions) == {record_digest(both)}


def test_a_version_of_parts_of_another_source_is_not_visible() -> None:
    stranger = PartRecord("net", SPEC, SPEC, "2026", (), part(1, "a").variants)
    record = VersionRecord("net", SOURCE, SPEC, (record_digest(stranger),))
    assert fold("net", file_records([stranger, record])).versions == {}


def test_a_superseded_version_names_the_one_in_its_place() -> None:
    one, two = part(1, "a"), part(2, "b", day=2)
    state = fold("net", file_records([one, two, version(one), version(one, two)]))
    assert state.versions[record_digest(version(one))].superseded_by == record_digest(version(one, two))
    assert latest_version(state).digest == record_digest(version(one, two))


def test_rolling_back_goes_back_one_promotion_each_time() -> None:
    parts = [part(i, f"v{i}", day=i + 1) for i in range(3)]
    versions = [version(one) for one in parts]
    moves = [move(i + 1, one) for i, one in enumerate(versions)]
    rollbacks = [move(4, versions[1], "rollback"), move(5, versions[0], "rollback")]
    state = fold("net", file_records([*parts, *versions, *moves, *rollbacks]))
    assert state.aliases["production"].stack == (record_digest(versions[0]),)
    assert len(state.aliases["production"].history) == 5


@pytest.mark.parametrize("wanted", ["nothing", "sha256:0", "00000000"])
def test_a_name_nothing_has_is_an_error_with_a_command(wanted: str) -> None:
    one = part(1, "a")
    state = fold("net", file_records([one, version(one)]))
    with pytest.raises(NotPublishedError, match="no such version") as raised:
        resolve(state, wanted, registry="somewhere")
    assert raised.value.hint == "ortprep versions net --registry somewhere"


def test_the_first_digits_of_a_digest_name_a_version() -> None:
    one = part(1, "a")
    state = fold("net", file_records([one, version(one)]))
    digest = record_digest(version(one))
    for wanted in (digest, digest[:15], digest.removeprefix("sha256:")[:8]):
        assert resolve(state, wanted, registry="x").digest == digest


def test_a_record_is_what_its_name_says_or_an_error() -> None:
    name, data = encode_record(part(1, "a"))
    assert decode_record(name, data) == part(1, "a")
    for position in range(0, len(data), 7):
        changed = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        with pytest.raises(IntegrityError, match="not what its name says"):
            decode_record(name, changed)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"[]", BundleError),
        (b"\xff", BundleError),
        (b"{" * 100_000, BundleError),
        (b'{"schema_version":"2.0"}', UnsupportedVersionError),
        (b'{"schema_version":"1.0"}', BundleError),
        (b'{"schema_version":"1.0","label":"../up","version":"sha256:0"}', IntegrityError),
        (b'{"schema_version":"1.0","label":"a","version":"md5:00"}', IntegrityError),
    ],
)
def test_a_record_with_the_right_digest_and_bad_content_is_refused(
    data: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        decode_record(RecordName("claim", digest_bytes(data)), data)


@given(st.text(max_size=100))
def test_names_of_records_are_parsed_or_ignored(text: str) -> None:
    name = RecordName.parse(text)
    assert name is None or str(name) == text
