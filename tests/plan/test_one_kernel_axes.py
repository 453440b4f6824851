"""Plans that are one launch: what a schedule is told that no such plan has."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import ficco
from ficco import Schedule


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_reduce"])
def test_the_error_names_all_axes_that_must_change(op: str) -> None:
    problem = ficco.Problem.chunked(op, world=2, m=8, n=64, k=8)
    schedule = Schedule(
        grain=1, transport="sm", cut="rows", compute="per_step", pace="in_step", route="rotation"
    )
    with pytest.raises(ficco.ScheduleError) as told:
        ficco.lower(problem, schedule)
    found, nearest = str(told.value).split("; ")
    assert all(axis in found for axis in ("cut=", "compute=", "pace=", "route="))
    assert nearest.endswith(", or transport='dma'")
    changes = dict(re.findall(r"(\w+)='(\w+)'", nearest.removesuffix(", or transport='dma'")))
    assert ficco.verify(ficco.lower(problem, replace(schedule, **changes))).ok
