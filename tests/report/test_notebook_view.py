"""What a notebook shows of a bundle: its headline and a table, and no text of others as markup."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ortprep.report.html_page import render_summary
from tests.report.builders import manifest


def test_a_measured_model_has_a_table_without_empty_rows() -> None:
    html = render_summary(manifest())
    assert html.count("<table") == 1
    assert "GPU MB" not in html
    assert "prepared (shipped)" in html
    assert "<script" not in html
    assert "http-equiv" not in html


def test_a_model_that_was_not_measured_has_none() -> None:
    html = render_summary(replace(manifest(), variants=()))
    assert "not measured" in html
    assert "<table" not in html


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "a&b"])
def test_text_of_others_is_no_markup(name: str) -> None:
    html = render_summary(replace(manifest(), name=name))
    assert name not in html
