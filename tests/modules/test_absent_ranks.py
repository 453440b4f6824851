"""A rank that does not come is found by the group's timeout, whatever the ranks exchange.

What the ranks do is in absent_worker.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run


@pytest.mark.parametrize("check", ["forward", "measure", "stopped"])
def test_others_are_told_by_the_timeout_of_the_group(
    check: str, tmp_path: Path, torch: Any
) -> None:
    run("absent_worker.py", 2, tmp_path, checks=(check,))
