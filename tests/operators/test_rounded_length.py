"""Rounded lengths of rows: few plans for the lookups of jagged batches."""

from __future__ import annotations

import pytest

from ficco.operators.functions import rounded_length
from ficco.operators.problem_checks import MOST


@pytest.mark.parametrize("lookups", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 64])
@pytest.mark.parametrize("batch", [1024, 4096, 8192, 16384])
def test_batches_of_usual_sizes_share_a_plan(lookups: int, batch: int) -> None:
    mean = lookups * batch
    lengths = {rounded_length(round(mean * share / 1000)) for share in range(960, 1041)}
    assert len(lengths) == 1, f"{lengths} for about {mean} lookups"


def test_a_row_is_at_least_as_long_as_its_elements() -> None:
    for count in (*range(1, 400), 5376, 5377, MOST - 1, MOST):
        assert count <= rounded_length(count) <= MOST
    assert rounded_length(0) == 0, "plans without lookups are different"
