"""Gated steps as launches: what kernels do, and what they are not asked to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade import signalling_reduce_scatter

from ficco.errors import ScheduleError
from ficco.lowering import lower_rank
from ficco.passes.gated import launches_of
from ficco.problem import Problem
from ficco.schedule import Schedule


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("pairs", [(), ((2, 3), (1, 4), (5,))])
def test_sums_within_are_a_launch_behind_that_of_peers_parts(
    op: str, cut: str, pairs: tuple[tuple[int, ...], ...]
) -> None:
    problem = Problem.chunked(op, 3, 12, 8, 15, "bfloat16", bias=True)
    schedule = replace(Schedule.named("gated_sums_1d"), grain=2, route="rotation", cut=cut)
    plan = lower_rank(replace(problem, pairs=pairs), replace(schedule, transport="dma"), 1)
    pushing, summing = [launches_of(plan, step) for step in plan.steps if step.parts]
    (pushed,), (summed,) = pushing, summing
    assert len(pushed.parts) == 4 and all(part.signal >= 0 for part in pushed.parts)
    assert pushed.bias is None and pushed.recv is None and pushed.c.buffer == "partial"
    assert len(summed.parts) == 2 and summed.bias is not None and summed.recv is not None
    assert all(len(part.terms) == 3 for part in summed.parts)
    sent_on = op == "matmul_all_reduce"
    assert all((part.signal >= 0) == sent_on for part in summed.parts)
    assert summed.c.buffer == "y0" and summed.begun == pushed.begun == bool(pairs)
    assert {part.col for part in summed.parts} == ({0} if cut == "rows" else {0, 4})


def test_parts_of_several_kinds_are_no_launch() -> None:
    plan = signalling_reduce_scatter().ranks[0]
    step = next(step for step in plan.steps if step.parts)
    with pytest.raises(ScheduleError, match="a separate launch"):
        launches_of(plan, step)
