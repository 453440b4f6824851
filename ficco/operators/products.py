"""Shared code of the operators that multiply matrices: weights, attachments and dot products."""

from __future__ import annotations

from ficco.core.errors import InputError, shown
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.operators.registry import Operand
from ficco.operators.symbolic import Content, Source, row_of


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


def bias_terms(problem: Problem, i: int, owner: int) -> list[Content]:
    """Return the rows that follow output i on a rank, as terms of every row of the output."""
    return [row_of(Source((owner, bias.name), 0, 0)) for bias in problem.attached(owner, f"y{i}")]
