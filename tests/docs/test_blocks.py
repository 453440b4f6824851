"""Every code block of README and docs runs; those for GPUs are compiled here (see blocks.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from blocks import ROOT, blocks_of, pages
from page_runner import matches
from running import run_alone, run_ranks

PAGES = {str(page.relative_to(ROOT)): blocks_of(page) for page in pages()}


def having(how: str) -> list[str]:
    """Return the pages that have a block of this kind."""
    return [page for page, blocks in PAGES.items() if any(b.how == how for b in blocks)]


@pytest.mark.parametrize("page", having("run"))
def test_blocks_run(page: str, tmp_path: Path) -> None:
    assert not (failure := run_alone(ROOT / page, tmp_path)), failure


@pytest.mark.parametrize("page", having("ranks"))
def test_blocks_of_several_ranks_run(page: str, tmp_path: Path) -> None:
    (world,) = {int(block.argument) for block in PAGES[page] if block.how == "ranks"}
    assert not (failure := run_ranks(ROOT / page, tmp_path, "ranks", world)), failure


@pytest.mark.parametrize("page", having("gpu"))
def test_blocks_for_gpus_compile(page: str) -> None:
    for block in PAGES[page]:
        if block.how == "gpu" and block.language == "python":
            compile(block.text, str(block), "exec")


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n<!-- test: ranks 2 -->\n```python\nimport os\n"
        "assert os.environ['RANK'] == '0', 'not rank 0'\n```\n\n```sh\nfalse\n```\n"
    )
    assert "not rank 0" in run_ranks(page, tmp_path, "ranks", 2)
    assert f"{page}:9: exit code 1" in run_alone(page, tmp_path)


def test_an_output_that_differs_is_noticed() -> None:
    assert matches("a ... c\n", "a  b\nc\n")
    assert not matches("a ... d\n", "a b c\n")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "include}" not in (ROOT / page).read_text()]
)
def test_a_page_begins_with_a_title_and_a_paragraph(page: str) -> None:
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("<!--", "---"))]
    assert lines[0].startswith("# "), page
    assert lines[1][0].isalpha() or lines[1][0] in "`*[", page
