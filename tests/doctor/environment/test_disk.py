from __future__ import annotations

from pathlib import Path

from ortprep.doctor.environment.facts.disk import read_disk_space


def test_a_folder_not_made_yet_is_on_the_disk_it_will_be_on(tmp_path: Path) -> None:
    assert read_disk_space(tmp_path / "not" / "made").total_bytes == read_disk_space(tmp_path).total_bytes
