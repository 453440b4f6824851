"""What native code passes to a kernel, held against Triton's PTX and launcher, without a GPU."""

from __future__ import annotations

from pathlib import Path

from forking import run_forked

WORKER = Path(__file__).with_name("launching_worker.py")


def test_launches_are_described_right(tmp_path: Path, torch: object) -> None:
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": "cache"}
    code, said = run_forked(WORKER, folder=tmp_path, environment=settings, timeout=300)
    assert code == 0 and "right" in said, said
