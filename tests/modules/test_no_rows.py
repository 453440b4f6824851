"""Functions on ranks of which some or all have matrices without rows or columns.

What each rank checks is in no_rows_worker.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_without_rows(world: int, tmp_path: Path, torch: Any) -> None:
    run("no_rows_worker.py", world, tmp_path)
