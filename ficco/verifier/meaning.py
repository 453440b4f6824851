"""The meaning of each operator: its buffers, and the required value of every output element.

Only this module of the verifier depends on operators. Values are those of `ficco.symbolic`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ficco.plan import Buffer
from ficco.problem import Pair, Problem, offsets
from ficco.symbolic import Content, Source, combined, dot, row_of
from ficco.verifier.tiles import Box

__all__ = ["Expected", "expected", "required_buffers"]


class Expected(NamedTuple):
    """A box of an output and its required content."""

    buffer: str
    box: Box
    content: Content


def required_buffers(problem: Problem, rank: int) -> list[Buffer]:
    """Return the inputs, weights and outputs that a rank's plan must declare."""
    p, dtype = problem, problem.dtype
    if p.op == "embedding_all_to_all":
        return _embedding_buffers(p, rank)
    pairs = p.pairs_of(rank) if p.depths else [Pair("x", p.outputs[0].operand, p.k)]
    height = p.m if p.depths else p.rows[rank]
    buffers = {pair.x: Buffer(pair.x, "input", height, pair.depth, dtype) for pair in pairs}
    for i, output in enumerate(p.outputs):
        columns = output.columns[rank]
        buffers[f"y{i}"] = Buffer(f"y{i}", "output", *p.result_shapes(rank)[i], dtype)
        if output.axis == "gathered":
            continue
        weights = [(pair.w, pair.depth) for pair in pairs]
        if not p.depths:
            weights = [(output.operand, p.m if output.axis == "contraction" else p.k)]
        for name, inner in weights:
            shape = (columns, inner) if output.operand_transposed else (inner, columns)
            buffers[name] = Buffer(name, "weight", *shape, dtype)
        if output.bias:
            buffers[f"bias{i}"] = Buffer(f"bias{i}", "weight", 1, columns, dtype)
    return list(buffers.values())


def _embedding_buffers(p: Problem, rank: int) -> list[Buffer]:
    """Return the buffers of tables, and of the whole batch's indices and offsets."""
    dim = p.outputs[0].columns[0]
    width = dim * sum(len(tables) for tables in p.tables)
    lookups = p.lookups[rank]
    buffers = [Buffer("y0", "output", p.rows[rank], width, p.dtype)]
    for i, rows in enumerate(p.tables[rank]):
        buffers += [
            Buffer(f"table{i}", "weight", rows, dim, p.dtype),
            Buffer(f"indices{i}", "input", 1, lookups[i], "int64"),
            Buffer(f"offsets{i}", "input", 1, p.m, "int64"),
        ]
    return buffers


def expected(problem: Problem, rank: int) -> Iterator[Expected]:
    """Yield the required content of every box of this rank's outputs."""
    if problem.op == "embedding_all_to_all":
        yield from _embedding(problem, rank)
        return
    for i, output in enumerate(problem.outputs):
        if output.axis == "gathered":
            yield from _kept(problem, i)
            continue
        for owner, box, terms in _boxes(problem, rank, i):
            if box.area:
                bias = [row_of(Source((owner, f"bias{i}"), 0, 0))] if output.bias else []
                yield Expected(f"y{i}", box, combined([*terms, *bias]))


def _kept(p: Problem, i: int) -> Iterator[Expected]:
    """Yield the rows of every rank's x."""
    first = offsets(p.rows)
    for s in range(p.world):
        if p.rows[s]:
            box = Box(first[s], first[s + 1], 0, p.k)
            yield Expected(f"y{i}", box, Source((s, "x"), -first[s], 0))


def _boxes(p: Problem, rank: int, i: int) -> Iterator[tuple[int, Box, list[Content]]]:
    """Yield the boxes of output i: the rank of the bias, the box, and the terms of its sum."""
    output = p.outputs[i]
    columns, turned = output.columns[rank], output.operand_transposed
    first = offsets(p.rows)

    def term(s: int, owner: int, along: bool, down: int, gap: int, depth: int) -> Content:
        """Return x of rank s times the weight of `owner`."""
        weight = (owner, output.operand)
        return dot((s, "x"), along, down, weight, turned, 0, gap, (0, depth))

    if p.op == "all_gather_matmul" and output.axis == "rows":
        for s in range(p.world):
            box = Box(first[s], first[s + 1], 0, columns)
            yield rank, box, [term(s, rank, False, -first[s], 0, p.k)]
    elif p.op == "all_gather_matmul":
        sources = [s for s in range(p.world) if p.rows[s]]
        terms = [term(s, rank, True, 0, first[s], p.rows[s]) for s in sources]
        yield rank, Box(0, p.k, 0, columns), terms
    elif p.op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        scattered = p.op == "matmul_reduce_scatter"
        for owner in (rank,) if scattered else range(p.world):
            at = 0 if scattered else first[owner]
            terms = [
                dot((s, x), False, first[owner] - at, (s, w), turned, 0, 0, (0, depth))
                for s in range(p.world)
                for x, w, depth in p.pairs_of(s)
                if depth
            ]
            yield owner, Box(at, at + p.rows[owner], 0, columns), terms
    else:
        arrived = offsets([p.splits[s][rank] for s in range(p.world)])
        for s in range(p.world):
            begin = offsets(p.splits[s])[rank]
            owner = rank if p.op == "all_to_all_matmul" else s
            box = Box(arrived[s], arrived[s + 1], 0, columns)
            yield rank, box, [term(s, owner, False, begin - arrived[s], 0, p.k)]


def _embedding(p: Problem, rank: int) -> Iterator[Expected]:
    dim, column = p.outputs[0].columns[0], 0
    begin = offsets(p.rows)[rank]
    for s in range(p.world):
        for i in range(len(p.tables[s])):
            box = Box(0, p.rows[rank], column, column + dim)
            if box.area:
                yield Expected("y0", box, Source((s, f"bags of table{i}"), begin, -column))
            column += dim
