"""Updates of table rows by sorted lookups: under Triton's interpreter, and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import run_forked

WORKER = Path(__file__).with_name("row_updates_worker.py")


@pytest.mark.parametrize("subject", ["values", "split", "modules", "refusals", "assembly"])
def test_row_updates(subject: str, tmp_path: Path, torch: object) -> None:
    interpret = "0" if subject == "assembly" else "1"
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": "cache"}
    code, said = run_forked(WORKER, subject, folder=tmp_path, environment=settings, timeout=200)
    assert code == 0 and "right" in said, said
