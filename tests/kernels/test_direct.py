"""The direct kernel, from tables of real plans: under Triton's interpreter, and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_gated import run_worker


@pytest.mark.parametrize("subject", ["products", "giving_up refusals"], ids=["products", "others"])
def test_it_is_right(subject: str, tmp_path: Path, torch: object) -> None:
    run_worker(subject, tmp_path, "1", "direct")


def test_what_is_compiled_raises_behind_stores_and_loads_behind_words(
    tmp_path: Path, torch: object
) -> None:
    run_worker("assembly", tmp_path, "0", "direct")
