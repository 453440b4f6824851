"""What cannot be is refused by ficco's functions in one clear error.

What each rank passes is in bad_input_worker.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run


@pytest.mark.parametrize("world", [2])
def test_bad_input_is_one_clear_error_in_every_rank(world: int, tmp_path: Path, torch: Any) -> None:
    run("bad_input_worker.py", world, tmp_path)
