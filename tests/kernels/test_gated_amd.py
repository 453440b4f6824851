"""The gated GEMM for AMD's devices: under Triton's interpreter, and its instructions."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_gated import run_worker


@pytest.mark.parametrize("subjects", ["products", "giving_up limit late stopped refusals"])
def test_it_is_right(subjects: str, tmp_path: Path, torch: object) -> None:
    run_worker(subjects, tmp_path, "1", "gated_amd")
