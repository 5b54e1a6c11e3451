"""What reading a stranger's manifest or loader.json costs in memory, measured in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ortprep.bundle.codec import MAX_JSON_BYTES, MAX_JSON_VALUES, decode, parse_json
from ortprep.bundle.digest import digest_json
from ortprep.bundle.loader_config import MAX_LOADER_BYTES
from ortprep.bundle.manifest import MAX_MANIFEST_BYTES, Manifest
from ortprep.errors import BundleError
from tests.bundle.builders import write_bundle

MOST_MB = {"manifest": 256, "loader_config": 64}
"""Above what the most expensive file takes; without limits, one of 16 MiB took 500 and more."""
READ = """\
import pathlib, re, sys
from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.errors import BundleError
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
before = peak()
try:
    {"manifest": read_manifest, "loader_config": read_loader_config}[sys.argv[1]](pathlib.Path(sys.argv[2]))
    print("read", (peak() - before) // 1024)
except BundleError as error:
    print("too" in str(error) and "refused", (peak() - before) // 1024)
"""
FILES = {
    "manifest": ("manifest.json", MAX_MANIFEST_BYTES),
    "loader_config": ("loader.json", MAX_LOADER_BYTES),
}


def nested(brackets: int) -> str:
    """Returns lists in lists: the most memory for a byte."""
    return ",".join(["[" * 60 + "]" * 60] * (brackets // 61))


def objects(values: int) -> str:
    """Returns objects with names of their own: the most memory for a value."""
    return ",".join(f'{{"{number:x}":0}}' for number in range(values // 3))


def wide(size: int) -> str:
    """Returns a string that takes four bytes for each of its characters once one needs them."""
    return f'"{"a" * size}\N{GRINNING FACE}"'


def write_hostile(folder: Path, file: str, text: str) -> int:
    """Puts JSON into a field that readers do not know, with the digest of all; returns the file's size."""
    path = write_bundle(folder) / file
    data = {**json.loads(path.read_text()), "unknown": json.loads(f"[{text}]")}
    data.pop("self_digest")
    data["self_digest"] = digest_json(data)
    path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")))
    return path.stat().st_size


def read_in_child(what: str, folder: Path) -> tuple[str, int]:
    """Reads a file in a fresh process; returns what came of it, and the peak of its memory in MB."""
    ended = subprocess.run(
        [sys.executable, "-c", READ, what, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    outcome, peak_mb = ended.stdout.split()
    return outcome, int(peak_mb)


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("shape", [nested, objects])
@pytest.mark.attack
def test_f7_the_most_expensive_file_that_is_read_takes_bounded_memory(
    tmp_path: Path, what: str, shape: Callable[[int], str]
) -> None:
    file, most_bytes = FILES[what]
    values = min(MAX_JSON_VALUES - 5000, most_bytes // 4)
    text = shape(values)
    text += "," + wide(most_bytes - len(text) - 50_000) if len(text) < most_bytes - 60_000 else ""
    assert write_hostile(tmp_path / "bundle", file, text) <= most_bytes
    outcome, peak_mb = read_in_child(what, tmp_path / "bundle")
    assert outcome == "read"
    assert peak_mb < MOST_MB[what]


@pytest.mark.parametrize(
    "text",
    [nested(4 * MAX_JSON_VALUES), objects(2 * MAX_JSON_VALUES), wide(16 * 2**20)],
    ids=["nested", "objects", "wide"],
)
@pytest.mark.attack
def test_f7_a_file_past_the_limits_is_refused_before_it_is_parsed(tmp_path: Path, text: str) -> None:
    path = write_bundle(tmp_path / "bundle") / "manifest.json"
    path.write_text(f'{path.read_text().rstrip().removesuffix("}")}, "unknown": [{text}]}}')
    outcome, peak_mb = read_in_child("manifest", tmp_path / "bundle")
    assert outcome == "refused"
    assert peak_mb < 2 * MAX_JSON_BYTES / 2**20 + 16


@pytest.mark.attack
def test_a_long_name_is_not_copied_for_each_of_its_values(tmp_path: Path) -> None:
    """A name of 6 MB with 600,000 values took minutes; the message shows what each value costs."""
    data = json.loads((write_bundle(tmp_path / "bundle") / "manifest.json").read_text())
    record = {"runs_per_load": 1, "limits": {}, "knobs": {"k" * 6_000_000: ["", 0]}}
    data["variants"][0]["tuning"] = record
    with pytest.raises(BundleError, match=r"\[1\]") as caught:
        decode(Manifest, parse_json(json.dumps(data).encode(), name="manifest.json"))
    assert len(caught.value.message) < 1000
