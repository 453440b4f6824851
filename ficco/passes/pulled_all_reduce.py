"""The table of an all-reduce whose sums read peers' products. Numbers only: no torch, no Triton.

The plan's buffers and signals suggest a table. `readback_one_kernel` says what the kernel does with
it, and the plan must be the same, step by step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ficco.errors import PlanError
from ficco.lowering.pulled_all_reduce import PRODUCTS, SUMS
from ficco.passes.readback_one_kernel import steps_of_one_kernel
from ficco.plan import RankPlan, Region, Step, window_places
from ficco.tables import OutputNames, PullTable

__all__ = ["table_of"]


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
        _refuse(plan, made, "it does not make the whole product in the window")
    wanted = steps_of_one_kernel(made.id, made.lane, table, plan.buffers)
    for step, expected in zip(steps, wanted, strict=False):
        if _content(step) != _content(expected):
            _refuse(plan, step, f"the kernel does {_words(expected)} here")
    if len(steps) != len(wanted):
        _refuse(plan, plan.steps[-1], f"the plan has {len(steps)} steps, the kernel {len(wanted)}")
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
        chunks=max(indices, default=1), products=places[PRODUCTS],
        sums=places.get(SUMS, 0), outputs=(OutputNames("y0", w.name, bias, y.cols, turned),),
    )  # fmt: skip


def _content(step: Step) -> tuple[Any, ...]:
    """Return what a step does, without its name."""
    return step._replace(id="", signals=(), products=()), frozenset(step.signals)


def _words(step: Step) -> str:
    signals = f" of {_listed(step.signals)}" if step.signals else ""
    boxes = f" from {_listed(step.reads)} to {_listed(step.writes)}" if step.writes else ""
    return f"a {step.kind}{signals}{boxes}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "nothing"


def _refuse(plan: RankPlan, step: Step, why: str) -> None:
    raise PlanError(
        f"rank {plan.rank}, step {step.id!r}: {why}; the kernel runs only plans of "
        "matmul_all_reduce with transport='sm' and compute='whole' on several ranks"
    )
