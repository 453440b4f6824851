"""The timelines in the documentation are what the simulator predicts today."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ficco.core import data

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from make_timelines import (
    FOLDER,
    IDEA_FILE,
    PICTURES,
    Picture,
    description,
    idea,
    idea_description,
    timeline_of,
)

REMEDY = "run docs/make_timelines.py again"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.path.stem)
def test_a_picture_is_up_to_date(picture: Picture) -> None:
    text = picture.path.read_text()
    assert f">{description(picture, timeline_of(picture))}<" in text, REMEDY


def test_there_is_a_picture_of_each_schedule_and_no_other_file() -> None:
    assert {picture.schedule for picture in PICTURES} == set(data.names("named"))
    assert sorted(FOLDER.iterdir()) == sorted({picture.path for picture in PICTURES}), REMEDY


@pytest.mark.parametrize(
    "path", [IDEA_FILE, *(picture.path for picture in PICTURES)], ids=lambda path: path.stem
)
def test_a_picture_can_be_read_on_light_and_dark_pages(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"#000000|#1b1b1b|#5a5a5a", text), "a text or a line is dark"
    backgrounds = re.findall(r'id="patch_[12]">\s*<path [^>]*style="([^"]*)"', text)
    assert backgrounds == ["fill: none"] * 2, "the background is not transparent"


def test_every_picture_is_on_the_page() -> None:
    page = (FOLDER.parents[1] / "guides" / "choose_a_schedule.md").read_text()
    shown = re.findall(r"\]\(\.\./_static/timelines/(\w+)\.svg\)", page)
    assert sorted(shown) == sorted(picture.path.stem for picture in PICTURES)


def test_the_picture_of_the_idea_is_up_to_date_and_shown() -> None:
    """`serial` ends later than the overlapped call below it, in README, the index and the idea."""
    both = idea()
    assert f">{idea_description(both)}<" in IDEA_FILE.read_text(), REMEDY
    ends: dict[str, float] = {}
    for span in both.spans:
        ends[span.lane] = max(ends.get(span.lane, 0.0), span.end_us)
    assert ends["overlap: GEMM"] < 0.8 * ends["serial"] and len(ends) == 3, ends
    docs = FOLDER.parents[1]
    for page in (docs.parent / "README.md", docs / "index.md", docs / "concepts/the_idea.md"):
        targets = re.findall(r"\]\(([^)]*idea\.svg)\)", page.read_text())
        assert [(page.parent / target).resolve() for target in targets] == [IDEA_FILE], page
