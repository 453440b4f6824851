"""The table of an all-reduce whose sums read peers' products. Numbers only: no torch, no Triton.

The plan's buffers and signals suggest a table. `readback_one_kernel` says what the kernel does with
it, and the plan must be the same, step by step.
"""

from __future__ import annotations

from ficco.lowering.pulled_all_reduce import PRODUCTS, SUMS
from ficco.passes.readback_one_kernel import steps_of_one_kernel
from ficco.passes.same_steps import check_same_steps, refuse
from ficco.plan import RankPlan, Region, window_places
from ficco.tables import OutputNames, PullTable

__all__ = ["table_of"]

_PLANS = "matmul_all_reduce with transport='sm' and compute='whole'"


def table_of(plan: RankPlan) -> PullTable:
    """Return the table of a rank's plan.

    Args:
        plan: of a matmul_all_reduce with transport "sm" and compute "whole", on several ranks.

    Raises:
        PlanError: the kernel cannot run the plan; the message names the step.
    """
    made, *steps = plan.steps
    entered = next((step for step in steps if step.kind == "raise"), made)
    world = len(entered.signals) + 1
    table = _suggested(plan, world)
    whole = Region(plan.rank, PRODUCTS, 0, table.m, 0, table.n)
    targets = [product.c for product in made.products] or list(made.writes)
    if targets != [whole] or made.signals or made.reads:
        refuse(plan, made, "it does not make the whole product in the window", _PLANS)
    wanted = steps_of_one_kernel(made.id, made.lane, table, plan.buffers)
    check_same_steps(plan, steps, wanted, _PLANS)
    return table


def _suggested(plan: RankPlan, world: int) -> PullTable:
    """Return the table that the buffers, the regions of sums and the signals suggest."""
    rank, x, y = plan.rank, plan.buffer("x"), plan.buffer("y0")
    places, _ = window_places(plan.buffers)
    twice = SUMS in places
    rows = [0] * world
    for step in plan.steps:
        sums = step.writes if step.kind == "reduce" else step.reads if step.kind == "copy" else ()
        for region in sums:
            if region.buffer == SUMS and region.rank < world:
                rows[region.rank] += region.rows
    indices = [s.chunk for step in plan.steps for s in step.signals if s.name == "data"]
    weights = [buffer for buffer in plan.buffers if buffer.role == "weight"]
    w = next(buffer for buffer in weights if buffer.name != "bias0")
    bias = "bias0" if len(weights) > 1 else ""
    turned = any(step.transpose_b for step in plan.steps)
    turned = turned or (x.cols == 0 and w.rows > 0)  # a plan without products
    return PullTable(
        rank=rank, world=world, m=y.rows, n=y.cols, k=x.cols, dtype=y.dtype,
        bias=bool(bias), twice=twice, rows=tuple(rows) if twice else (),
        chunks=max(indices, default=0) + 1, products=places[PRODUCTS],
        sums=places.get(SUMS, 0), outputs=(OutputNames("y0", w.name, bias, y.cols, turned),),
    )  # fmt: skip
