"""The first call of a process loads ficco's modules and opens the group; others may begin then."""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import run_forked

WORKER = Path(__file__).with_name("first_call_worker.py")


@pytest.mark.parametrize("how", ["whole", "name", "threads"])
def test_calls_that_begin_during_the_first_call(how: str, tmp_path: Path) -> None:
    code, said = run_forked(WORKER, how, folder=tmp_path, environment={}, timeout=100, kind="torch")
    assert code == 0, said
