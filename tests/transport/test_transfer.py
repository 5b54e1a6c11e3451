"""A file arrives whole and unmixed, or not at all, whatever its source does."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import RegistryError, RegistryUnavailableError
from ortprep.transport import transfer
from ortprep.transport.time_limit import limit_time
from ortprep.transport.transfer import BLOCK_BYTES, Download, download

SIZE = 5000


@pytest.fixture(autouse=True, scope="module")
def _no_pause():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "FIRST_PAUSE_S", 0.0)
        yield


@dataclass
class Answer:
    """What a source does when it is asked.

    Attributes:
        cut_at: Where it breaks off; None for never.
        changed: Whether the file is another one since the last answer.
        whole: Whether it begins at the beginning, whatever is asked.
        sha256: Digest that it gives, if any.
    """

    cut_at: int | None = None
    changed: bool = False
    whole: bool = False
    sha256: str | None = None


@dataclass
class Source:
    """A source with a script; after it, it does what it is asked."""

    answers: list[Answer]
    has_versions: bool = True
    unit: int = 1
    version: int = 0
    offsets: list[int] = field(default_factory=list)

    @property
    def content(self):
        return bytes([self.version]) * self.unit * SIZE

    @contextmanager
    def open(self, offset, version):
        self.offsets.append(offset)
        answer = self.answers.pop(0) if self.answers else Answer()
        self.version += answer.changed
        current = str(self.version) if self.has_versions else None
        start = 0 if answer.whole or version is None or version != current else offset
        yield Download(
            self._blocks(start // self.unit, answer.cut_at), start, len(self.content), current, answer.sha256
        )

    def _blocks(self, start, cut_at):
        end = SIZE if cut_at is None else max(start, cut_at)
        for at in range(start, end, 1000):
            yield self.content[at * self.unit : min(at + 1000, end) * self.unit]
        if cut_at is not None:
            raise RegistryUnavailableError("cut")


ANSWERS = st.builds(
    Answer, cut_at=st.none() | st.integers(0, SIZE), changed=st.booleans(), whole=st.booleans()
)


@given(st.lists(ANSWERS, max_size=8), st.booleans())
def test_what_arrives_is_the_file_as_it_is(answers, has_versions):
    source = Source(answers, has_versions)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "got"
        got = download(source.open, path, name="m.onnx", attempts=9)
        assert path.read_bytes() == source.content
    assert got == FileEntry("m.onnx", SIZE, digest_bytes(source.content))


@given(st.lists(ANSWERS, max_size=5), st.integers(0, SIZE + 1))
def test_what_an_earlier_process_left_counts_where_the_digest_is_known(answers, left):
    for answer in answers:
        answer.changed = False
    source = Source(answers)
    expected = FileEntry("m.onnx", SIZE, digest_bytes(source.content))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "got"
        path.write_bytes(bytes(left))
        got = download(
            lambda offset, _: source.open(offset, "0"), path, name="m", expected=expected, attempts=9
        )
        assert path.read_bytes() == source.content
    assert (got.size_bytes, got.sha256) == (SIZE, expected.sha256)
    assert source.offsets[:1] == ([] if left == SIZE else [left if left < SIZE else 0])


def test_a_download_ends_after_tries_that_bring_nothing_and_only_then(tmp_path):
    nothing = Source([Answer(0)] * 9)
    with pytest.raises(RegistryUnavailableError, match="cut"):
        download(nothing.open, tmp_path / "got", name="m.onnx", attempts=2)
    assert len(nothing.offsets) == 2
    block = Source([Answer(at) for at in range(1000, SIZE, 1000)], unit=BLOCK_BYTES // 1000 + 1)
    assert download(block.open, tmp_path / "got", name="m.onnx", attempts=2)
    assert len(block.offsets) == 5


def test_bytes_that_the_source_did_not_mean_are_fetched_again(tmp_path):
    source = Source([Answer(sha256=digest_bytes(b"other"))])
    download(source.open, tmp_path / "got", name="m.onnx")
    assert source.offsets == [0, 0]


@pytest.mark.attack
def test_a_download_is_limited_in_size_and_time(tmp_path):
    with pytest.raises(RegistryError, match="at most 4999 bytes, got more") as caught:
        download(Source([]).open, tmp_path / "got", name="m.onnx", max_bytes=SIZE - 1)
    assert not isinstance(caught.value, RegistryUnavailableError)
    with (
        limit_time(-1, lambda: RegistryError("took too long")),
        pytest.raises(RegistryError, match="took too long") as caught,
    ):
        download(Source([]).open, tmp_path / "got", name="m.onnx")
    assert not isinstance(caught.value, RegistryUnavailableError)


def test_progress_is_told_after_every_block(tmp_path):
    told: list[tuple[int, int | None]] = []
    download(
        Source([Answer(2000)]).open,
        tmp_path / "got",
        name="m.onnx",
        progress=lambda done, size: told.append((done, size)),
    )
    assert told == [(done, SIZE) for done in (0, 1000, 2000, 2000, 3000, 4000, 5000)]


def test_a_full_disk_is_not_taken_for_a_bad_connection():
    source = Source([])
    with pytest.raises(OSError, match="No space left"):
        download(source.open, Path("/dev/full"), name="m.onnx")
    assert source.offsets == [0]
