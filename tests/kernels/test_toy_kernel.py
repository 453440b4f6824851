"""A kernel that sends its tiles to peers is added by one record and one device function.

It is in `toy_kernel`; tests/driver/toy_on_double.py runs programs with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import run_forked

WORKER = Path(__file__).with_name("toy_worker.py")


@pytest.mark.parametrize("subject", ["tiles", "giving_up", "described"])
def test_a_record_and_a_device_function_are_enough(
    subject: str, tmp_path: Path, torch: object
) -> None:
    interpret = "0" if subject == "described" else "1"
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": "cache"}
    code, said = run_forked(WORKER, subject, folder=tmp_path, environment=settings, timeout=200)
    assert code == 0 and "right" in said, said
