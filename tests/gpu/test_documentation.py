"""The code blocks of README and docs that are marked for GPUs, with a process per GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "docs"))

from blocks import ROOT, blocks_of, pages
from running import run_ranks

PAGES = [
    str(page.relative_to(ROOT))
    for page in pages()
    if any(block.how == "gpu" for block in blocks_of(page))
]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str, gpus: int, tmp_path: Path) -> None:
    assert not (failure := run_ranks(ROOT / page, tmp_path, "gpu", 2)), failure
