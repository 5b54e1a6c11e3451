import pytest

from bench.rapidocr_app import BUNDLES, PLAIN, report


def runs(*, page_ms=500.0, private_mb=200.0, text="total"):
    """Three processes on a machine that changes its speed."""
    return [
        {"first_ms": 1200 * speed, "page_ms": page_ms * speed, "private_mb": private_mb, "answers": [[text]]}
        for speed in (1.0, 1.4, 0.9)
    ]


@pytest.mark.parametrize(
    ("bundles", "missed"),
    [
        ({}, []),
        ({"page_ms": 400.0, "private_mb": 150.0}, []),
        ({"page_ms": 550.0}, ["page_ms no worse"]),
        ({"private_mb": 201.0}, ["private_mb no worse"]),
        ({"text": "tota1"}, ["answers identical"]),
    ],
)
def test_whatever_is_worse_on_bundles_is_a_missed_goal(bundles, missed):
    found = report({PLAIN: runs(), BUNDLES: runs(**bundles)})
    assert [goal for goal, reached in found["reached"].items() if not reached] == missed


def test_ratios_are_of_bundles_to_plain():
    figures = report({PLAIN: runs(), BUNDLES: runs(page_ms=400.0)})["figures"]
    assert figures["page_ms"]["bundles_to_plain"] == pytest.approx(0.8)
    assert figures["page_ms"][PLAIN]["median"] == 500.0
