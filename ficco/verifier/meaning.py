"""What each operator means: the buffers it has, and what every output element must be.

This is the only place where the verifier knows operators. Values are those of `contents`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ficco.plan import Buffer, RankPlan
from ficco.problem import Problem, offsets
from ficco.verifier.contents import Box, Content, Source, combined, dot, row_of

__all__ = ["Expected", "expected", "required_buffers"]


class Expected(NamedTuple):
    """A box of an output and what it must hold."""

    buffer: str
    box: Box
    content: Content


def required_buffers(problem: Problem, declared: RankPlan) -> list[Buffer]:
    """Return the inputs, weights and outputs that a rank's plan must declare."""
    p, dtype, rank = problem, problem.dtype, declared.rank
    if p.op == "embedding_all_to_all":
        return _embedding_buffers(p, declared)
    depth = p.depths[rank] if p.depths else p.k
    height = p.m if p.depths else p.rows[rank]
    buffers = {"x": Buffer("x", "input", height, depth, dtype)}
    for i, output in enumerate(p.outputs):
        columns = output.columns[rank]
        inner = p.m if output.axis == "contraction" else depth
        shape = (columns, inner) if output.operand_transposed else (inner, columns)
        buffers[output.operand] = Buffer(output.operand, "weight", *shape, dtype)
        if output.bias:
            buffers[f"bias{i}"] = Buffer(f"bias{i}", "weight", 1, columns, dtype)
        rows = p.k if output.axis == "contraction" else _result_rows(p, rank)
        buffers[f"y{i}"] = Buffer(f"y{i}", "output", rows, columns, dtype)
    return list(buffers.values())


def _embedding_buffers(p: Problem, declared: RankPlan) -> list[Buffer]:
    """Tables, and the whole batch's indices (as many as the plan states) and offsets."""
    dim = p.outputs[0].columns[0]
    width = dim * sum(len(tables) for tables in p.tables)
    stated = {buffer.name: buffer.cols for buffer in declared.buffers}
    buffers = [Buffer("y0", "output", p.rows[declared.rank], width, p.dtype)]
    for i, rows in enumerate(p.tables[declared.rank]):
        buffers += [
            Buffer(f"table{i}", "weight", rows, dim, p.dtype),
            Buffer(f"indices{i}", "input", 1, stated.get(f"indices{i}", 0), "int64"),
            Buffer(f"offsets{i}", "input", 1, p.m, "int64"),
        ]
    return buffers


def _result_rows(p: Problem, rank: int) -> int:
    if p.op == "matmul_reduce_scatter":
        return p.rows[rank]
    if p.splits:
        return sum(p.splits[s][rank] for s in range(p.world))
    return p.m


def expected(problem: Problem, rank: int) -> Iterator[Expected]:
    """Yield what every part of this rank's outputs must hold."""
    if problem.op == "embedding_all_to_all":
        yield from _embedding(problem, rank)
        return
    for i, output in enumerate(problem.outputs):
        bias = row_of(Source((rank, f"bias{i}"), 0, 0)) if output.bias else None
        for box, terms in _boxes(problem, rank, i):
            if box.area:
                both = [*terms, bias] if bias is not None else terms
                yield Expected(f"y{i}", box, combined(both))


def _boxes(p: Problem, rank: int, i: int) -> Iterator[tuple[Box, list[Content]]]:
    output = p.outputs[i]
    columns, turned = output.columns[rank], output.operand_transposed
    first = offsets(p.rows)

    def weight(owner: int) -> tuple[int, str]:
        return owner, output.operand

    if p.op == "all_gather_matmul" and output.axis == "rows":
        for s in range(p.world):
            yield (
                Box(first[s], first[s + 1], 0, columns),
                [dot((s, "x"), False, -first[s], weight(rank), turned, 0, 0, (0, p.k))],
            )
    elif p.op == "all_gather_matmul":
        yield (
            Box(0, p.k, 0, columns),
            [
                dot((s, "x"), True, 0, weight(rank), turned, 0, first[s], (0, p.rows[s]))
                for s in range(p.world)
                if p.rows[s]
            ],
        )
    elif p.op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        scattered = p.op == "matmul_reduce_scatter"
        top = first[rank] if scattered else 0
        yield (
            Box(0, p.rows[rank] if scattered else p.m, 0, columns),
            [
                dot((s, "x"), False, top, weight(s), turned, 0, 0, (0, p.depths[s]))
                for s in range(p.world)
                if p.depths[s]
            ],
        )
    else:
        arrived = offsets([p.splits[s][rank] for s in range(p.world)])
        for s in range(p.world):
            begin = offsets(p.splits[s])[rank]
            owner = rank if p.op == "all_to_all_matmul" else s
            yield (
                Box(arrived[s], arrived[s + 1], 0, columns),
                [dot((s, "x"), False, begin - arrived[s], weight(owner), turned, 0, 0, (0, p.k))],
            )


def _embedding(p: Problem, rank: int) -> Iterator[Expected]:
    dim, column = p.outputs[0].columns[0], 0
    begin = offsets(p.rows)[rank]
    for s in range(p.world):
        for i in range(len(p.tables[s])):
            box = Box(0, p.rows[rank], column, column + dim)
            if box.area:
                yield Expected("y0", box, Source((s, f"bags of table{i}"), begin, -column))
            column += dim
