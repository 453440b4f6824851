"""Plans that are one kernel: their detection, and their entries."""

from __future__ import annotations

from ficco.lowering.multiplying import WINDOW as GATHERED
from ficco.lowering.one_kernel_pool import POOLED
from ficco.lowering.pulling import PRODUCTS
from ficco.lowering.sending import SENT
from ficco.plan import RankPlan, Region, has_mailbox
from ficco.plan.tables import OneKernelTable, OutputNames, PullTable, SendTable, WholeTable
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
    """Return the launch of a plan that is one kernel, and the products of a library beside it.

    Args:
        plan: of a rank.
        shared: whether another rank is on the same device.

    Raises:
        PlanError: see `table_of`.
    """
    table = table_of(plan)
    keeps = isinstance(table, SendTable) and table.finish == "keep"
    kinds = () if keeps else ("gemm", "reduce", "bag")
    begun = next((step for step in plan.steps if step.kind in kinds), plan.steps[0])
    waits = tuple([(step.id, step.signals) for step in plan.steps if step.kind == "wait"])
    kernel = Launch(begun.id, begun.lane, (), OneKernel(table, waits, shared), "native")
    products = [
        Launch(f"product.{names.y}", begun.lane, (), _product(plan, table, names), "library")
        for names in table.outputs
        if _by_library(table) and names.n
    ]
    return [kernel, *products] if keeps else [*products, kernel]


def _by_library(table: WholeTable) -> bool:
    """Return whether a library makes the products, if there are any."""
    if isinstance(table, PullTable):
        return table.made > 0
    if isinstance(table, SendTable):
        return table.finish == "keep" and table.arriving > 0
    return isinstance(table, OneKernelTable) and table.made


def _product(plan: RankPlan, table: WholeTable, names: OutputNames) -> Gemm | Reduce:
    """Return the product of x and a weight: before a kernel that reads it, or behind one.

    Kernels add the bias to products that they read.
    """
    source, target, biases = "x", names.y, [names.bias] if names.bias else []
    if isinstance(table, SendTable):
        source, rows = table.kept, table.arriving
    else:
        biases, rows = [], plan.buffer("x").rows
        target = PRODUCTS if isinstance(table, PullTable) else names.y
    w = plan.buffer(names.w)
    x = Region(plan.rank, source, 0, rows, 0, plan.buffer("x").cols)
    y = Region(plan.rank, target, 0, rows, 0, plan.buffer(target).cols)
    added = tuple([Region(plan.rank, name, 0, 1, 0, names.n) for name in biases])
    if not x.cols:
        return Reduce(added, y)
    b = Region(plan.rank, w.name, 0, w.rows, 0, w.cols)
    return Gemm(x, b, y, add=added, transpose_b=names.turned)
