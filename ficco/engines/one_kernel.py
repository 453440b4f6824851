"""Plans that are one kernel: their detection, the kernel's table, and the products before it."""

from __future__ import annotations

from ficco.engines.work import Call, whole_product
from ficco.kernels import one_kernel_all_reduce_table, one_kernel_gather_table
from ficco.kernels.one_kernel_all_reduce_table import OneKernelTable
from ficco.kernels.one_kernel_gather_table import GatherTable
from ficco.lowering.multiplying import WINDOW as GATHERED
from ficco.lowering.one_kernel_all_reduce import is_made_before
from ficco.plan import RankPlan

__all__ = ["is_one_launch", "made_before", "table_of"]


def is_one_launch(plan: RankPlan) -> bool:
    """Return whether one kernel runs a rank's plan; with transport "sm" also the handshake.

    A rank without rows to store takes part in such a call, too.
    """
    one_lane = len({step.lane for step in plan.steps}) == 1
    copies = all(step.unit == "sm" for step in plan.steps if step.kind == "copy")
    return one_lane and copies and any(step.signals for step in plan.steps)


def table_of(plan: RankPlan) -> tuple[OneKernelTable | GatherTable, str]:
    """Return the table of a plan's one launch, and the output that keeps x, or "" without one."""
    if any(buffer.name == GATHERED for buffer in plan.buffers):
        table = one_kernel_gather_table.table_of(plan)
        return table, table.kept
    return one_kernel_all_reduce_table.table_of(plan), ""


def made_before(plan: RankPlan, table: OneKernelTable | GatherTable | None) -> list[Call]:
    """Return the products that are enqueued before a plan's one launch, which reads them in y."""
    if not isinstance(table, OneKernelTable) or not is_made_before(table.m, table.twice):
        return []
    return [whole_product(plan, names) for names in table.outputs]
