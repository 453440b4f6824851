"""A world of one rank: its GEMMs or its pooling, without window or signals."""

from __future__ import annotations

from ficco.lowering.producing import Bags, Piece, Products
from ficco.plan import Buffer, RankPlan, Region
from ficco.problem import Problem

__all__ = ["alone", "alone_with_bags"]


def alone(problem: Problem, products: Products) -> RankPlan:
    """Return the plan of a world of one, for operators that multiply before they send."""
    m, n = problem.m, problem.n
    bias = (Region(0, "bias0", 0, 1, 0, n),) if problem.outputs[0].bias else ()
    steps = products.whole(Region(0, "y0", 0, m, 0, n), bias)
    buffers = (*products.operands(), Buffer("y0", "output", m, n, problem.dtype))
    return RankPlan(0, buffers, tuple(steps))


def alone_with_bags(problem: Problem, bags: Bags) -> RankPlan:
    """Return the plan of a world of one that pools its tables."""
    rows, columns = problem.m, problem.n * len(problem.tables[0])
    piece = Piece(0, rows, 0, columns, Region(0, "y0", 0, rows, 0, columns))
    output = Buffer("y0", "output", rows, columns, problem.dtype)
    return RankPlan(0, (*bags.operands(), output), tuple(bags.steps("all", [piece])))
