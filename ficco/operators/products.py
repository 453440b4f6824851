"""Shared code of the operators that multiply matrices: weights, biases and dot products."""

from __future__ import annotations

import math

from ficco.errors import InputError, shown
from ficco.problem import Output, Problem
from ficco.registry import Array, Draw, Operand
from ficco.symbolic import Content, Source, dot, row_of

__all__ = [
    "bias_operand",
    "bias_terms",
    "check_one_output",
    "draw_weight",
    "one_output",
    "product_of",
    "weight_operand",
]


def one_output(world: int, n: int) -> dict[str, tuple[Output, ...]]:
    """Return the outputs of a problem with one product, of n columns on every rank."""
    return {"outputs": (Output((n,) * world),)}


def check_one_output(problem: Problem) -> None:
    """Reject several outputs, axes other than rows, and columns that differ between ranks."""
    only = problem.outputs[0]
    if len(problem.outputs) > 1 or only.axis != "rows" or len(set(only.columns)) > 1:
        found = [(output.axis, output.columns) for output in problem.outputs]
        raise InputError(
            f"outputs: (axis, columns) are {shown(found)}; {problem.op} has one output, along "
            "rows, with the same columns on every rank"
        )


def weight_operand(problem: Problem, output: Output, name: str, inner: int, rank: int) -> Operand:
    """Return the weight of an output on a rank."""
    columns = output.columns[rank]
    shape = (columns, inner) if output.operand_transposed else (inner, columns)
    return Operand(name, "weight", *shape, problem.dtype)


def bias_operand(problem: Problem, i: int, rank: int) -> list[Operand]:
    """Return the bias of output i on a rank, or an empty list."""
    output = problem.outputs[i]
    name, columns = f"bias{i}", output.columns[rank]
    return [Operand(name, "weight", 1, columns, problem.dtype)] if output.bias else []


def draw_weight(problem: Problem, output: Output, inner: int, rank: int, draw: Draw) -> Array:
    """Return a random weight of N(0, 1/k), in its buffer's layout."""
    w = draw.normal(inner, output.columns[rank], 1 / math.sqrt(problem.k))
    return w.T if output.operand_transposed else w


def product_of(problem: Problem, sender: int, owner: int, down: int) -> Content:
    """Return the rows of the sender's x from row `down` on, times the owner's weight."""
    output = problem.outputs[0]
    weight = (owner, output.operand)
    return dot((sender, "x"), False, down, weight, output.operand_transposed, 0, 0, (0, problem.k))


def bias_terms(problem: Problem, i: int, owner: int) -> list[Content]:
    """Return the bias of a rank as a term of every row of output i, or an empty list."""
    return [row_of(Source((owner, f"bias{i}"), 0, 0))] if problem.outputs[i].bias else []
