"""The first call of a process loads ficco's modules and opens the group; others may begin then."""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import run_forked, run_ranks

WORKER = Path(__file__).with_name("first_call_worker.py")


@pytest.mark.parametrize("how", ["whole", "name", "raising", "forking", "closing"])
def test_calls_of_handlers_and_threads(how: str, tmp_path: Path) -> None:
    code, said = run_forked(
        WORKER, how, tmp_path / "store", folder=tmp_path, environment={}, timeout=100, kind="torch"
    )
    assert code == 0, said


@pytest.mark.parametrize(("how", "kind"), [("threads", ""), ("dying", "torch")])
def test_calls_of_ranks(how: str, kind: str, tmp_path: Path) -> None:
    run_ranks(
        2, WORKER, how, tmp_path / "store", folder=tmp_path, environment={}, timeout=100, kind=kind
    )
