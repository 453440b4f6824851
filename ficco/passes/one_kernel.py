"""Plans that are one kernel: their detection, and their entries."""

from __future__ import annotations

from ficco.lowering.multiplying import WINDOW as GATHERED
from ficco.passes import one_kernel_all_reduce, one_kernel_gather
from ficco.plan import RankPlan, Region, has_mailbox
from ficco.program import Gemm, Launch, OneKernel
from ficco.tables import GatherTable, OneKernelTable, OutputNames

__all__ = ["is_one_kernel", "one_kernel_entries", "table_of"]


def is_one_kernel(plan: RankPlan) -> bool:
    """Return whether one kernel runs a rank's plan; with transport "sm" also the handshake.

    A rank without rows to store takes part in such a call, too.
    """
    windows = has_mailbox(plan.buffers) or any(buffer.name == GATHERED for buffer in plan.buffers)
    one_lane = len({step.lane for step in plan.steps}) == 1
    copies = all(step.unit == "sm" for step in plan.steps if step.kind == "copy")
    return windows and one_lane and copies and any(step.signals for step in plan.steps)


def table_of(plan: RankPlan) -> OneKernelTable | GatherTable:
    """Return the table of a plan's one launch.

    Raises:
        PlanError: no kernel can run the plan; the message names the step.
    """
    if any(buffer.name == GATHERED for buffer in plan.buffers):
        return one_kernel_gather.table_of(plan)
    return one_kernel_all_reduce.table_of(plan)


def one_kernel_entries(plan: RankPlan) -> list[Launch]:
    """Return the launch of a plan that is one kernel, behind the products made before it.

    Raises:
        PlanError: see `table_of`.
    """
    table = table_of(plan)
    made = isinstance(table, OneKernelTable) and table.made
    compute = next((step for step in plan.steps if step.kind in ("gemm", "reduce")), plan.steps[0])
    entries = [
        Launch(f"product.{names.y}", compute.lane, (), _product(plan, names), "library")
        for names in table.outputs
        if made
    ]
    waits = tuple([(step.id, step.signals) for step in plan.steps if step.kind == "wait"])
    return [*entries, Launch(compute.id, compute.lane, (), OneKernel(table, waits), "native")]


def _product(plan: RankPlan, names: OutputNames) -> Gemm:
    """Return the whole product of x and a weight, without its bias."""
    x, w, y = [
        Region(plan.rank, name, 0, buffer.rows, 0, buffer.cols)
        for name in ("x", names.w, names.y)
        for buffer in (plan.buffer(name),)
    ]
    return Gemm(x, w, y, transpose_b=names.turned)
