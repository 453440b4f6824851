"""The code blocks of README and docs that are marked for GPUs, with a process per GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def failure_of(folder: Path, page: str) -> str:
    """Run the blocks of a page on two GPUs; return nothing, or what went wrong."""
    return run_ranks(ROOT / page, folder, "gpu", 2)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.programs((failure_of, page))) for page in PAGES]
)
def test_blocks_run(page: str, programs: Callable[..., str]) -> None:
    assert not (failure := programs(failure_of, page)), failure
