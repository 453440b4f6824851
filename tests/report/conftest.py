"""One sweep's folder with its page, for all tests of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import sweep_folders

from ficco.cli.report import sweep as sweep_page


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three cases that "ran", among them losing ones, and its report.html."""
    made = tmp_path_factory.mktemp("sweep")
    few, large = sweep_folders.SHAPES[3], sweep_folders.SHAPES[1]
    lines = sweep_folders.simulated_sweep(made, (few,), noise=0.3, regimes=("eager", "captured"))
    lines += sweep_folders.simulated_sweep(made, (large,), noise=0.3, regimes=("captured",))
    sweep_folders.write(made, "h200x4", lines, executed=True)
    sweep_page.write(made)
    return made


@pytest.fixture(scope="session")
def report(folder: Path) -> Path:
    """The page of that folder."""
    return folder / "report.html"
