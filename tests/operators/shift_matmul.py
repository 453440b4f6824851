"""An operator of one file: rank r multiplies the rows of rank r-1 with its own weight.

x_r [m_r, k], w_r [k, n]: y_r = x_(r-1) . w_r. It is made of values that `Flow` has already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ficco.operators.arrays import common_dtype, matrices, row_contiguous
from ficco.operators.blocks import Blocks, Incoming, Outgoing
from ficco.operators.functions import CALL, join, product_flops, split
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.operators.products import check_one_output, one_output, weight_operand
from ficco.operators.reference import exact_product, weight_of, wide
from ficco.operators.registry import Expected, Flow, Function, Local, Operand, Operator, Posed
from ficco.operators.symbolic import dot

NAME = "shift_matmul"


def _sender(problem: Problem, rank: int) -> int:
    return (rank - 1) % problem.world


def _blocks(problem: Problem, rank: int) -> Blocks:
    rows, sender, reader = problem.rows, _sender(problem, rank), (rank + 1) % problem.world
    outgoing = tuple(Outgoing(0, rows[rank] * (d == reader), 0) for d in range(problem.world))
    incoming = tuple(Incoming(0, rows[s] * (s == sender)) for s in range(problem.world))
    return Blocks(rank, outgoing, incoming, max(rows))


def _operands(problem: Problem, rank: int) -> list[Operand]:
    p, output = problem, problem.outputs[0]
    return [
        Operand("x", "input", p.rows[rank], p.k, p.dtype),
        weight_operand(p, output, output.operand, p.k, rank),
    ]


def _meaning(problem: Problem, rank: int) -> Iterator[Expected]:
    p, output, sender = problem, problem.outputs[0], _sender(problem, rank)
    weight = (rank, output.operand)
    term = dot((sender, "x"), False, 0, weight, output.operand_transposed, 0, 0, (0, p.k))
    if p.rows[sender]:
        yield Expected("y0", 0, p.rows[sender], 0, p.n, term)


def _reference(problem: Problem, inputs: Sequence[Any], ranks: Sequence[int]) -> Any:
    return [
        [exact_product(wide(inputs[_sender(problem, r)]["x"]), weight_of(problem, inputs[r], 0))]
        for r in ranks
    ]


def _pose(name: str, library: Any, xs: Sequence[Any], ws: Sequence[Any]) -> Posed:
    shards, weights = matrices(xs, "xs", library), matrices(ws, "ws", library)
    dtype, world = common_dtype([*shards, *weights], "xs and ws"), len(xs)
    rows, (k, n) = tuple(x.shape[0] for x in shards), weights[0].shape
    problem = Problem(name, world, rows, k, (Output((n,) * world),), dtype.name)
    pairs = zip(shards, weights, strict=True)
    return Posed(problem, [{"x": row_contiguous(x, library), "w": w} for x, w in pairs])


def _local(call: Any, x: Any, w: Any) -> Local:
    call.check(w, "w", 2)
    output = Output((w.shape[1],) * call.world)
    rows = (call.first,) * call.world
    problem = Problem(call.name, call.world, rows, w.shape[0], (output,), call.dtype)
    return Local(problem, {"x": x, "w": w})


OPERATOR = Operator(
    name=NAME,
    label="shift+mm",
    flow=Flow("gather", "products", "multiply", "all_to_all"),
    check=check_one_output,
    fields=lambda world, m, n, k, rows: one_output(world, n),
    result_shapes=lambda problem, rank: [(problem.rows[_sender(problem, rank)], problem.n)],
    operands=_operands,
    meaning=_meaning,
    blocks=_blocks,
    reference=_reference,
    pose=_pose,
    function=Function(
        name=NAME,
        schema=f"(Tensor x, Tensor w, {CALL}) -> Tensor",
        shapes=lambda ranks, x, w, *rest: x.new_empty((x.shape[0], w.shape[1])),
        flat=split(2),
        nested=join,
        local=_local,
        flops=product_flops,
    ),
)
