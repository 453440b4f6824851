"""Plans that are one launch: what a schedule is told that no such plan has."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import ficco
from ficco import Schedule


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_reduce", "matmul_all_to_all"])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_the_error_names_all_axes_that_must_change(op: str, cut: str) -> None:
    problem = ficco.Problem.chunked(op, world=2, m=8, n=64, k=8)
    schedule = Schedule(
        grain=1, transport="sm", cut=cut, compute="per_step", pace="in_step", route="rotation",
        start="together" if cut == "rows" else "local_first",
    )  # fmt: skip
    with pytest.raises(ficco.ScheduleError) as told:
        ficco.lower(problem, schedule)
    found, nearest = str(told.value).split("; ")
    assert all(axis in found for axis in ("compute=", "pace=", "route="))
    if op == "matmul_all_to_all":
        assert ("cut=" in found) == (cut == "columns"), "it has one such kernel"
    else:
        assert "start=" in found
    assert nearest.endswith(", or transport='dma'")
    changes = dict(re.findall(r"(\w+)='(\w+)'", nearest.removesuffix(", or transport='dma'")))
    assert ficco.verify(ficco.lower(problem, replace(schedule, **changes))).ok
