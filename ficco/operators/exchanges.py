"""Shared code of the operators of a mixture of experts: x_r in row blocks, one for each rank.

splits[s][r] rows go from rank s to rank r. Each rank has one weight w_r [k, n].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ficco.core.checking import check_sum, whole_numbers
from ficco.core.errors import InputError, shown
from ficco.operators.arrays import (
    Library,
    check_most,
    common_dtype,
    matrices,
    row_contiguous,
)
from ficco.operators.functions import CALL, empty_columns, join, other_call, split
from ficco.operators.problem import Problem, chunk_sizes, offsets
from ficco.operators.problem_checks import Output, check_per_rank
from ficco.operators.products import (
    bias_terms,
    check_one_output,
    one_output,
    weight_operand,
)
from ficco.operators.reference import (
    exact_product,
    library_of,
    rows_of,
    terms_of,
    weight_of,
    wide,
    zero_of,
)
from ficco.operators.registry import (
    Array,
    Arrays,
    Exact,
    Expected,
    Function,
    Local,
    Operand,
    Posed,
)
from ficco.operators.shapes import Named, check_exchanged
from ficco.operators.symbolic import combined, dot


def check(problem: Problem) -> None:
    """Reject splits that do not add up to the rows of every rank."""
    p = problem
    check_one_output(p)
    if len(p.splits) != p.world:
        raise InputError(f"splits: {len(p.splits)} rows found, {p.world} are needed, one per rank")
    for rank, row in enumerate(p.splits):
        check_per_rank(f"splits[{rank}]", row, p.world)
        if sum(row) != p.rows[rank]:
            raise InputError(
                f"splits[{rank}]={shown(list(row))} add up to {shown(sum(row))}, but "
                f"rows[{rank}]={p.rows[rank]}"
            )


def fields(world: int, m: int, n: int, k: int, rows: Sequence[int]) -> dict[str, Any]:
    """See `Operator.fields`."""
    return {**one_output(world, n), "splits": tuple(chunk_sizes(r, world) for r in rows)}


def result_shapes(problem: Problem, rank: int) -> list[tuple[int, int]]:
    """See `Operator.result_shapes`."""
    return [(sum(row[rank] for row in problem.splits), problem.n)]


def operands(problem: Problem, rank: int) -> list[Operand]:
    """See `Operator.operands`."""
    p, output = problem, problem.outputs[0]
    return [
        Operand("x", "input", p.rows[rank], p.k, p.dtype),
        weight_operand(p, output, output.operand, p.k, rank),
    ]


def expected(problem: Problem, rank: int) -> Iterator[Expected]:
    """See `Operator.meaning`."""
    p, output = problem, problem.outputs[0]
    arrived = offsets([row[rank] for row in p.splits])
    for s in range(p.world):
        begin = offsets(p.splits[s])[rank]
        down, w = begin - arrived[s], (rank if p.flow.gathers else s, output.operand)
        term = dot((s, "x"), False, down, w, output.operand_transposed, 0, 0, (0, p.k))
        if p.splits[s][rank]:
            content = combined([term, *bias_terms(p, 0, rank)])
            yield Expected("y0", arrived[s], arrived[s + 1], 0, output.columns[rank], content)


def reference(
    problem: Problem, inputs: Sequence[Arrays], ranks: Sequence[int]
) -> list[list[Exact]]:
    """See `Operator.reference`."""
    return [[_received(problem, inputs, rank)] for rank in ranks]


def _received(problem: Problem, inputs: Sequence[Arrays], rank: int) -> Exact:
    """Return a rank's exact output: the products of its blocks of every rank's x, stacked."""
    blocks = []
    for s, arrays in enumerate(inputs):
        begin, end = offsets(problem.splits[s])[rank : rank + 2]
        weight = weight_of(problem, inputs[rank if problem.flow.gathers else s], 0)
        terms = terms_of(problem, arrays, begin, end)
        blocks.append(exact_product(wide(arrays["x"][begin:end]), weight, *terms))
    extra = sum(rows_of(problem, inputs[rank], 0), 0.0)
    library = library_of(blocks[0].value)
    value = library.concatenate([block.value for block in blocks]) + extra
    magnitude = library.concatenate([block.magnitude for block in blocks]) + abs(extra)
    return Exact(value, magnitude, zero_of(value), problem.k + 1)


def problem_of(op: str, splits: tuple[tuple[int, ...], ...], k: int, n: int, dtype: str) -> Problem:
    """Return the problem of splits, and of w [k, n] on every rank."""
    rows, output = tuple([sum(row) for row in splits]), Output((n,) * len(splits))
    return Problem(op, len(splits), rows, k, (output,), dtype, splits=splits)


def pose(
    op: str,
    library: Library,
    xs: Sequence[Array],
    ws: Sequence[Array],
    splits: Sequence[Sequence[int]],
) -> Posed | list[list[Array]]:
    """Return the problem of x_r [rows, k] in row blocks and w_r [k, n], and its inputs."""
    world = len(xs)
    shards, weights = matrices(xs, "xs", library), matrices(ws, "ws", library)
    dtype, k = common_dtype([*shards, *weights], "xs and ws"), shards[0].shape[1]
    check_exchanged(
        [
            Named(f"xs[{rank}]", x, f"ws[{rank}]", w)
            for rank, (x, w) in enumerate(zip(shards, weights, strict=True))
        ]
    )
    if not isinstance(splits, (tuple, list)) and getattr(splits, "ndim", 0) < 1:
        raise InputError(f"splits={shown(splits)}: a list per rank is needed, splits[s][r]")
    table = tuple(whole_numbers(row, f"splits[{s}]") for s, row in enumerate(splits))
    if len(table) != world:
        raise InputError(f"splits has {len(table)} lists; {world} are needed, one per source rank")
    for rank, (x, row) in enumerate(zip(shards, table, strict=True)):
        check_sum(row, f"splits[{rank}]", world, x.shape[0], f"the rows of xs[{rank}]")
    m, n = sum(x.shape[0] for x in shards), weights[0].shape[1]
    check_most("xs and ws", m=m, k=k, n=n)
    if not (m and k and n):  # nothing is sent
        arriving = [sum(row[rank] for row in table) for rank in range(world)]
        return [[library.repeated((high, n), dtype, r)] for r, high in enumerate(arriving)]
    problem = problem_of(op, table, k, n, dtype.name)
    arrays = [
        {"x": row_contiguous(x, library), "w": w} for x, w in zip(shards, weights, strict=True)
    ]
    return Posed(problem, arrays)


# ---- the functions of PyTorch: x, w, splits, group, schedule, grain; splits are flat


def shapes(
    ranks: Callable[[str], tuple[int, int]],
    x: Array,
    w: Array,
    splits: Sequence[int],
    group: str,
    *rest: Any,
) -> Array:
    """See `Function.shapes`."""
    rank, world = ranks(group)
    return x.new_empty((sum(splits[rank::world]), w.shape[1]))


def local(call: Any, x: Array, w: Array, splits: Sequence[int]) -> Local | Array:
    """See `Function.local`."""
    call.check(x, "x", 2)
    call.check(w, "w", 2)
    check_exchanged([Named("x", x, "w", w)])
    table, (k, n) = splits_table(call, splits), w.shape
    if not (any(map(any, table)) and k and n):
        y = x.new_zeros((sum(row[call.rank] for row in table), n))
        if call.world == 1 or not any(map(any, table)):  # all ranks know all splits
            return y
        empty = empty_columns(call.rank, "w" if k else "x")
        more = tuple(tuple(size + 1 for size in row) for row in table)
        other = problem_of(call.name, more, 1, 1, call.dtype)
        return Local(*other_call(other, call.rank, x), [y], empty)
    return Local(problem_of(call.name, table, k, n, call.dtype), {"x": x, "w": w})


def splits_table(call: Any, flat: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return splits[s][r]; check that this rank's row adds up to the rows of x."""
    world = call.world
    if len(flat) != world * world:
        raise InputError(
            f"splits has {len(flat)} sizes; {world} x {world} are needed, splits[s][r]"
        )
    table = tuple(tuple(flat[s * world : (s + 1) * world]) for s in range(world))
    check_sum(table[call.rank], f"splits[{call.rank}]", world, call.first, "the rows of x")
    return table


def keep(tensors: Sequence[Any], rest: Any, needs: Sequence[bool], ys: Any) -> list[Any]:
    """See `Function.keep`."""
    return [tensors[0] if needs[1] else None, tensors[1] if needs[0] else None]


def function(name: str, flops: Callable[..., int], gradient: Callable[..., list[Any]]) -> Function:
    """Return the function of one of these operators."""
    return Function(
        name=name,
        schema=f"(Tensor x, Tensor w, SymInt[] splits, {CALL}) -> Tensor",
        shapes=shapes,
        flat=split(2),
        nested=join,
        local=local,
        flops=flops,
        keep=keep,
        gradient=gradient,
    )
