"""What a plan must declare and hold, from the record of its operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ficco.plan import Buffer
from ficco.problem import Problem
from ficco.symbolic import Content
from ficco.verifier.tiles import Box

__all__ = ["Expected", "expected", "required_buffers"]


class Expected(NamedTuple):
    """A box of an output and what it must hold."""

    buffer: str
    box: Box
    content: Content


def required_buffers(problem: Problem, rank: int) -> list[Buffer]:
    """Return the inputs, weights and outputs that a rank's plan must declare."""
    return [Buffer(*operand) for operand in problem.operator.operands(problem, rank)]


def expected(problem: Problem, rank: int) -> Iterator[Expected]:
    """Yield what every part of this rank's outputs must hold."""
    for buffer, row0, row1, col0, col1, content in problem.operator.meaning(problem, rank):
        yield Expected(buffer, Box(row0, row1, col0, col1), content)
