"""Shared parts of lowering to one kernel: required axes, operands and slices of columns.

A kernel that stores at peers or reads from them (`ficco.kernels`) runs the plan, including all
signals of the call. Lowering makes the kernel's table; `one_kernel_steps` makes the plan from it.
Writers to mailboxes do not wait for them to be free; see `ficco.plan`.
"""

from __future__ import annotations

from ficco.core.errors import ScheduleError
from ficco.lowering.producing import Products
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.plan.tables import OutputNames

ALIGN = 16  # columns: slices begin at a multiple of the widest store, if rows do

_NEEDED = {
    "cut": "columns", "route": "all_peers", "order": "by_step", "start": "together",
    "compute": "gated", "taper": "none", "pace": "free", "sums": "apart",
}  # fmt: skip


def check_axes(schedule: Schedule, **others: str) -> None:
    """Reject a schedule that one launch cannot run.

    Args:
        schedule: the schedule.
        others: axes that need another value than a kernel that multiplies and stores at peers.

    Raises:
        ScheduleError: the message names the nearest schedule that works.
    """
    needed = _NEEDED | others
    wrong = [axis for axis, value in needed.items() if getattr(schedule, axis) != value]
    if wrong:
        found = ", ".join(f"{axis}={getattr(schedule, axis)!r}" for axis in wrong)
        nearest = ", ".join(f"{axis}={needed[axis]!r}" for axis in wrong)
        raise ScheduleError(
            f"transport='sm' with {found} is not implemented; the nearest that works is {nearest}, "
            "or transport='dma'"
        )


def products_of(problem: Problem, rank: int) -> tuple[Products, OutputNames]:
    """Return the product that a rank makes for others, and the names of its matrices.

    Raises:
        ScheduleError: the rank multiplies several pairs.
    """
    if (pairs := max(map(len, problem.pairs), default=1)) > 1:
        raise ScheduleError(
            f"{problem.op}: transport='sm' multiplies one pair of x and w a rank; {pairs} found; "
            "the nearest that works is transport='dma'"
        )
    products, output = Products(problem, rank), problem.outputs[0]
    bias = "bias0" if output.bias else ""
    turned = output.operand_transposed
    return products, OutputNames("y0", products.last.w, bias, problem.n, turned)


def slices(size: int, chunks: int) -> list[tuple[int, int]]:
    """Cut `size` columns into `chunks` slices [begin, end), or fewer if there are too few."""
    width = max(1, -(-size // (chunks * ALIGN))) * ALIGN
    return [(begin, min(begin + width, size)) for begin in range(0, size, width)]
