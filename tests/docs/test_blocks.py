"""Every code block of README and docs runs; those for GPUs are type-checked here (see blocks.py)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from blocks import ROOT, blocks_of, pages
from page_runner import matches

RUNNER = Path(__file__).with_name("page_runner.py")
TIMEOUT_S = 120
PAGES = {str(page.relative_to(ROOT)): blocks_of(page) for page in pages()}


def having(*kinds: str) -> list[str]:
    """Return the pages that have a block of one of these kinds."""
    return [page for page, blocks in PAGES.items() if any(b.how in kinds for b in blocks)]


def environment() -> dict[str, str]:
    """Return the environment of a process: commands of this Python, and no machine is measured."""
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join([scripts, os.environ["PATH"]])
    return os.environ | {"PATH": path, "FICCO_MEASURE": "0", "PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize("page", having("run"))
def test_blocks_run(page: str, tmp_path: Path) -> None:
    command = [sys.executable, RUNNER, ROOT / page, "run"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), timeout=TIMEOUT_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", having("ranks"))
def test_blocks_of_several_ranks_run(page: str, tmp_path: Path) -> None:
    (world,) = {int(block.argument) for block in PAGES[page] if block.how == "ranks"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    ranks = [
        subprocess.Popen(
            [sys.executable, RUNNER, ROOT / page, "ranks"], cwd=tmp_path,
            env=environment() | meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)


@pytest.mark.parametrize("page", having("gpu"))
def test_blocks_for_gpus_compile(page: str) -> None:
    for block in PAGES[page]:
        if block.how == "gpu" and block.language == "python":
            compile(block.text, str(block), "exec")


def test_an_output_that_differs_is_noticed() -> None:
    assert matches("a ... c\n", "a  b\nc\n")
    assert not matches("a ... d\n", "a b c\n")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_well(page: str) -> None:
    """It has one title, and a paragraph that says what it is for."""
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("<!--", "---"))]
    assert lines[0].startswith("# "), page
    assert lines[1][0].isalpha() or lines[1][0] in "`*[", page
