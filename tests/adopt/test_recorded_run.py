"""Records of processes are read, and bad ones do not cost the good ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortprep.adopt.observation import ProcessRecord
from ortprep.adopt.recorded_run import read_records
from ortprep.bundle.codec import encode, format_json
from ortprep.errors import SpecError


@pytest.mark.parametrize(
    "bad",
    [b"{", b"{}", format_json({"x": "y" * 2**23})],
)
def test_a_bad_record_is_left_out_with_a_message(tmp_path: Path, bad: bytes) -> None:
    good = ProcessRecord(1, "python app.py", "1.31.1", ())
    (tmp_path / "1.json").write_bytes(bad)
    said: list[str] = []
    with pytest.raises(SpecError, match="no record can be read"):
        read_records(tmp_path, said.append)
    (tmp_path / "2.json").write_bytes(format_json(encode(good)))
    assert read_records(tmp_path, said.append) == (good,)
    assert len(said) == 2
