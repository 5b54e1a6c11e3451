"""Precisions and buckets of several machines in one version."""

from __future__ import annotations

from pathlib import Path

from pipeline.bundle.loader_config import find_variant, read_loader_config
from pipeline.bundle.manifest import read_manifest
from pipeline.bundle.verification import check_bundle
from pipeline.registry.cache import Cache
from pipeline.registry.catalogue import open_catalogue
from pipeline.registry.choosing import ALL, Wanted
from pipeline.registry.publishing import publish
from pipeline.registry.pulling import pull
from pipeline.registry.references import Reference
from tests.registry.bundles import BARE, ELSEWHERE, HERE, Build, Made, read_tree, write_bundle

OLDER = Build(
    (
        Made("cpu", HERE, b"cpu"),
        Made("cpu-int8", HERE, b"int8", golden=b"here"),
        Made("portable"),
        Made("cpu-batch4", HERE, b"four", golden=b"of four", batch=4),
    ),
    left_out=("cpu-fp16", "cpu-int4"),
)
NEWER = Build(
    (
        Made("cpu", ELSEWHERE, b"other cpu"),
        Made("cpu-int8", ELSEWHERE, b"other int8", golden=b"elsewhere"),
        Made("cpu-fp16", ELSEWHERE, b"half", golden=b"half"),
        Made("portable"),
    ),
    created_at="2026-11-21T00:00:00+00:00",
    left_out=("cpu-int4",),
)


def merged(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    with open_catalogue(str(tmp_path / "registry"), cache=Cache(tmp_path / "records")) as catalogue:
        for name, build in (("older", OLDER), ("newer", NEWER)):
            publish(write_bundle(tmp_path / name, build), catalogue)
        pull(Wanted(Reference("net", None), ALL), catalogue, out, hardware=BARE)
    check_bundle(out)
    return out


def test_every_variant_keeps_the_golden_sample_that_is_its_own(tmp_path: Path) -> None:
    out = merged(tmp_path)
    config, files = read_loader_config(out), read_tree(out)
    goldens = {
        variant.name: files[variant.golden.file.path]
        for variant in config.variants
        if variant.golden is not None
    }
    (renamed,) = [name for name in goldens if name.startswith("cpu-int8-")]
    expected = {"cpu-int8": b"elsewhere", renamed: b"here", "cpu-fp16": b"half", "cpu-batch4": b"of four"}
    assert goldens == expected


def test_f23_buckets_of_any_machine_come_after_all_variants_for_all_shapes(tmp_path: Path) -> None:
    config = read_loader_config(merged(tmp_path))
    assert config.variants[-1].name == "cpu-batch4"
    bucket = find_variant(config, "cpu-batch4")
    assert bucket is not None
    assert bucket.bucket
    assert dict(bucket.binding) == {"batch": 4}


def test_left_out_is_what_no_machine_has(tmp_path: Path) -> None:
    manifest = read_manifest(merged(tmp_path))
    assert [one.variant for one in manifest.left_out] == ["cpu-int4"]
