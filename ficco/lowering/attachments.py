"""Attachments in plans: the operands that are cut, travel and are bound with another operand.

Rows that follow an output (a bias) are added once to every row of it. Terms that follow x have a
row for each row of x. They travel with the first columns of their rows into a window of their own,
under the same signal, and are added to the products of these rows:

    x, window "gathered"       [rows, k]   x0.0->1         x0.1->1
    e, window "gathered_e"     [rows, n]   with x0.0->1

Lowering asks the operands of the problem, and knows no attachment by its name.
"""

from __future__ import annotations

from collections.abc import Sequence

from ficco.core.errors import ScheduleError
from ficco.operators.problem import Problem
from ficco.plan import Buffer, Region
from ficco.plan.schedule import Schedule

Regions = tuple[Region, ...]


def check_attachments(problem: Problem, schedule: Schedule) -> None:
    """Reject a schedule that does not move or add the attachments of a problem.

    Raises:
        ScheduleError: the message names the nearest that works.
    """
    moved = problem.flow.finish == "move" and problem.world > 1
    if moved and any(output.bias for output in problem.outputs):
        raise ScheduleError(
            f"{problem.op} has no bias: rows are made from other ranks' weights; add it afterwards"
        )
    if schedule.transport == "sm" and problem.operator.attachments:
        names = ", ".join(attachment.name for attachment in problem.operator.attachments)
        raise ScheduleError(
            f"{problem.op}: transport='sm': its kernels take no operands that follow x ({names}); "
            "the nearest that works is transport='dma'"
        )


def rows_added(problem: Problem, rank: int, output: int = 0) -> tuple[str, ...]:
    """Return the names of the single rows that are added to all rows of an output."""
    return tuple([row.name for row in problem.attached(rank, f"y{output}")])


def row_regions(rank: int, names: Sequence[str], col0: int, col1: int) -> Regions:
    """Return columns of single rows."""
    return tuple([Region(rank, name, 0, 1, col0, col1) for name in names])


class Terms:
    """The terms of a rank that follow x.

    Args:
        problem: the problem.
        rank: whose operands they are.
        window: the window, or workspace, into which x travels; "": x does not travel.
    """

    def __init__(self, problem: Problem, rank: int, window: str = "") -> None:
        self.window, self.operands = window, problem.attached(rank, "x")

    def with_terms(self, source: Region, target: Region) -> tuple[Regions, Regions]:
        """Return a box of x and its target, with the terms that travel with it, and theirs."""
        terms = self.operands if source.col0 == 0 else ()
        sources = [self.beside(source, term.name, 0, term.cols) for term in terms]
        targets = [self.beside(target, term.name, 0, term.cols) for term in terms]
        return (source, *sources), (target, *targets)

    def of(self, x: Region, col0: int, col1: int) -> Regions:
        """Return columns of the terms of the rows of a box of x."""
        return tuple([self.beside(x, term.name, col0, col1) for term in self.operands])

    def beside(self, x: Region, name: str, col0: int, col1: int) -> Region:
        """Return columns of a term, of the rows of a box of x: the term itself, or its window."""
        buffer = name if x.buffer == "x" else f"{self.window}_{name}"
        return x._replace(buffer=buffer, col0=col0, col1=col1)

    def windows(self, rows: int, role: str = "window", copies: int = 2) -> list[Buffer]:
        """Return the buffers into which the terms travel."""
        return [
            Buffer(f"{self.window}_{term.name}", role, rows, term.cols, term.dtype, copies)
            for term in self.operands
        ]
