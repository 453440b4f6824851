"""The plan of a kernel that a test adds: made from its table, proved, run and read back.

The kernel gathers x, and a library multiplies it. The kernel's record and device function run in
tests/kernels/test_toy_kernel.py, its programs on the driver's double in tests/driver.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import MESH
from test_readback import wrong

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))

from toy_kernel import ToyTable, append_steps

from ficco.lowering import one_kernel_steps
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Buffer, Plan, Product, RankPlan, Region, Step, digest_of
from ficco.plan.schedule import Schedule
from ficco.program import Gemm, Launch, OneKernel, Program
from ficco.program.passes.readback import read_back_plan
from ficco.program.target import cuda_target
from ficco.verifier import verify

M, N, COLUMNS = 5, 24, 8


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    one_kernel_steps.register(ToyTable, append_steps)
    yield
    del one_kernel_steps._KERNELS[ToyTable]


def plan_of(world: int) -> Plan:
    """Return the plan of an all-gather of x, with tiles of 2 rows, and of its product with w."""
    outputs = (Output((N,) * world, "", "gathered"), Output((COLUMNS,) * world))
    problem = Problem("all_gather_matmul", world, (M,) * world, N, outputs, "float32")
    schedule = Schedule.named("gather_sm").resolve(world, MESH)
    buffers = (
        Buffer("x", "input", M, N, "float32"),
        Buffer("w", "weight", N, COLUMNS, "float32"),
        Buffer("y0", "output", world * M, N, "float32"),
        Buffer("y1", "output", world * M, COLUMNS, "float32"),
        Buffer("tiles", "window", world * M, N, "float32", copies=2),
    )
    tables: list[Any] = [ToyTable(r, world, M, N, "float32", 2, 0) for r in range(world)]
    ranks = []
    for table in tables:
        made = one_kernel_steps.plan_of(table, buffers)
        gemm = Step("gemm", "compute", "gemm", "sm", products=(product(made),))
        ranks.append(made._replace(steps=(*made.steps, gemm)))
    return Plan(problem, schedule, digest_of(problem, schedule), tuple(ranks))


def product(plan: RankPlan) -> Product:
    """Return that of the gathered x and w."""
    return Product(*[
        Region(plan.rank, name, 0, plan.buffer(name).rows, 0, plan.buffer(name).cols)
        for name in ("y0", "w", "y1")
    ])  # fmt: skip


def programs_of(plan: Plan) -> list[Program]:
    """Return the program of each rank: two launches."""
    found = []
    for entry in plan.ranks:
        table: Any = ToyTable(entry.rank, plan.problem.world, M, N, "float32", 2, 0)
        waits = tuple([(step.id, step.signals) for step in entry.steps if step.kind == "wait"])
        launch = Launch("compute", "compute", (), OneKernel(table, waits), "native")
        gemm = Launch("gemm", "compute", (), Gemm(*product(entry)[:3]), "library")
        found.append(Program(entry.rank, cuda_target(), entry.buffers, (launch, gemm)))
    return found


@pytest.mark.parametrize("world", [2, 3, 5])
def test_its_plan_is_proved_and_runs_right(world: int) -> None:
    plan = plan_of(world)
    assert not verify(plan)
    assert wrong(plan, world) is None
    assert read_back_plan(plan, programs_of(plan)) == plan


def test_a_tile_that_goes_elsewhere_is_found() -> None:
    plan = plan_of(3)
    rank = plan.ranks[1]
    at = next(i for i, step in enumerate(rank.steps) if step.kind == "copy")
    push = rank.steps[at]
    first, *others = push.writes
    above = first._replace(row0=first.row0 - 1, row1=first.row1 - 1)
    moved = push._replace(writes=(above, *others))
    steps = (*rank.steps[:at], moved, *rank.steps[at + 1 :])
    ranks = (plan.ranks[0], rank._replace(steps=steps), plan.ranks[2])
    assert verify(plan._replace(ranks=ranks))
