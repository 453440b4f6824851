"""Plans that are one kernel: their detection, and their entries."""

from __future__ import annotations

from ficco.lowering.multiplying import WINDOW as GATHERED
from ficco.lowering.one_kernel_pool import POOLED
from ficco.lowering.pulled_all_reduce import PRODUCTS
from ficco.lowering.sending import SENT
from ficco.plan import RankPlan, Region, has_mailbox
from ficco.plan.tables import OneKernelTable, OutputNames, PullTable
from ficco.program import Gemm, Launch, OneKernel, Reduce
from ficco.program.passes.one_kernel_tables import table_of


def is_one_kernel(plan: RankPlan) -> bool:
    """Return whether one kernel runs a rank's plan; with transport "sm" also the handshake.

    A rank without rows to store takes part in such a call, too.
    """
    names = (GATHERED, PRODUCTS, POOLED, SENT)
    windows = has_mailbox(plan.buffers) or any(buffer.name in names for buffer in plan.buffers)
    one_lane = len({step.lane for step in plan.steps}) == 1
    copies = all(step.unit == "sm" for step in plan.steps if step.kind == "copy")
    return windows and one_lane and copies and any(step.signals for step in plan.steps)


def one_kernel_entries(plan: RankPlan, shared: bool = False) -> list[Launch]:
    """Return the launch of a plan that is one kernel, behind the products made before it.

    Args:
        plan: of a rank.
        shared: whether another rank is on the same device.

    Raises:
        PlanError: see `table_of`.
    """
    table = table_of(plan)
    pulls = isinstance(table, PullTable)
    made = pulls or (isinstance(table, OneKernelTable) and table.made)
    compute = next(
        (step for step in plan.steps if step.kind in ("gemm", "reduce", "bag")), plan.steps[0]
    )
    entries = [
        Launch(f"product.{names.y}", compute.lane, (),
               _product(plan, names, PRODUCTS if pulls else names.y), "library")
        for names in table.outputs
        if made
    ]  # fmt: skip
    waits = tuple([(step.id, step.signals) for step in plan.steps if step.kind == "wait"])
    return [
        *entries,
        Launch(compute.id, compute.lane, (), OneKernel(table, waits, shared), "native"),
    ]


def _product(plan: RankPlan, names: OutputNames, target: str) -> Gemm | Reduce:
    """Return the whole product of x and a weight in a buffer, without its bias; or zeros."""
    x, w, y = [
        Region(plan.rank, name, 0, buffer.rows, 0, buffer.cols)
        for name in ("x", names.w, target)
        for buffer in (plan.buffer(name),)
    ]
    return Gemm(x, w, y, transpose_b=names.turned) if x.cols else Reduce((), y)
