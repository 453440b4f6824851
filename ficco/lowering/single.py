"""One rank alone: one GEMM, no window, no words."""

from __future__ import annotations

from ficco.lowering.producing import COMPUTE, Products
from ficco.plan import Buffer, Product, RankPlan, Region, Step
from ficco.problem import Problem

__all__ = ["alone"]


def alone(problem: Problem, products: Products) -> RankPlan:
    """Return the plan of a world of one, for operators that multiply before they send."""
    m, n, k = problem.m, problem.n, problem.k
    output = problem.outputs[0]
    b = (0, n, 0, k) if output.operand_transposed else (0, k, 0, n)
    y = Region(0, "y0", 0, m, 0, n)
    add = (Region(0, "bias0", 0, 1, 0, n),) if output.bias else ()
    product = Product(Region(0, "x", 0, m, 0, k), Region(0, output.operand, *b), y, False, add)
    step = Step(
        "gemm", COMPUTE, "gemm", "sm", products=(product,), transpose_b=output.operand_transposed
    )
    buffers = (*products.operands(), Buffer("y0", "output", m, n, problem.dtype))
    return RankPlan(0, buffers, (step,))
