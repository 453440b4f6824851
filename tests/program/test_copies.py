"""Copies of programs whose target moves adjacent bytes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ficco.core.machine import Machine
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.program import Copy
from ficco.program.passes import compile_plan
from ficco.program.target import cuda_target, hip_target

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "all_to_all_matmul", "matmul_all_to_all")


def copies_of(op: str, name: str, target: str) -> list[Copy]:
    """Return the copies of 256 rows of a rank of three, which are not those of signals."""
    problem = Problem.chunked(op, 3, 768, 9, 12, "bfloat16")
    machine = Machine.named("mi300x8")
    schedule = replace(Schedule.named(name), grain=2).resolve(3, machine)
    of = hip_target() if target == "hip" else cuda_target()
    entries = compile_plan(lower_rank(problem, schedule, 1), of).entries
    return [entry for entry in entries if isinstance(entry, Copy)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["hetero_fused_1d", "uniform_fused_1d", "shard_p2p"])
def test_whole_rows_are_one_copy(op: str, name: str) -> None:
    one = {(copy.source, copy.target) for copy in copies_of(op, name, "hip")}
    assert one == {(copy.source, copy.target) for copy in copies_of(op, name, "cuda")}
    assert max(source.rows for source, _ in one) >= 32


def test_rows_of_a_part_of_the_columns_are_a_copy_each() -> None:
    apart = copies_of("all_gather_matmul", "uniform_fused_2d", "hip")
    boxes = copies_of("all_gather_matmul", "uniform_fused_2d", "cuda")
    assert all(copy.source.rows == 1 or copy.source.cols == 12 for copy in apart)
    assert len(apart) == sum(1 if copy.source.cols == 12 else copy.source.rows for copy in boxes)
