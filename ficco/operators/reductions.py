"""Shared code of the operators that add up products of all ranks: x_r [m, k_r], w_r [k_r, n].

A rank may have several pairs of x and w, whose products are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ficco.core.checking import check_sum, whole_numbers
from ficco.core.errors import InputError, shown
from ficco.operators import registry
from ficco.operators.arrays import (
    Library,
    bias_rows,
    biases_of,
    check_most,
    common_dtype,
    entry_name,
    listed,
    matrix,
)
from ficco.operators.functions import (
    as_matrix,
    empty_columns,
    empty_rows,
    other_call,
    size_for_this_rank,
    unequal_rows,
)
from ficco.operators.problem import Problem, chunk_sizes, offsets
from ficco.operators.problem_checks import Output, check_per_rank
from ficco.operators.products import (
    bias_terms,
    check_one_output,
    one_output,
    weight_operand,
)
from ficco.operators.reference import exact_product, rows_of, terms_of, wide
from ficco.operators.registry import Array, Arrays, Exact, Expected, Kept, Local, Operand, Posed
from ficco.operators.shapes import Named, check_summed
from ficco.operators.symbolic import combined, dot


def check(problem: Problem) -> None:
    """Reject depths and pairs that do not add up to k."""
    p = problem
    check_one_output(p)
    check_per_rank("depths", p.depths, p.world)
    if sum(p.depths) != p.k:
        found = f"depths={shown(list(p.depths))} add up to {shown(sum(p.depths))}"
        raise InputError(f"{found}, but k={p.k}")
    if p.pairs and len(p.pairs) != p.world:
        raise InputError(f"pairs: {len(p.pairs)} entries found, {p.world} are needed, one per rank")
    for rank, depths in enumerate(p.pairs):
        if not depths or min(depths) < 0 or sum(depths) != p.depths[rank]:
            raise InputError(
                f"pairs[{rank}]={shown(list(depths))}: one depth or more is needed, each 0 or "
                f"more, and they add up to depths[{rank}]={p.depths[rank]}"
            )


def fields(world: int, m: int, n: int, k: int, rows: Sequence[int]) -> dict[str, Any]:
    """See `Operator.fields`."""
    return {**one_output(world, n), "depths": chunk_sizes(k, world)}


def operands(problem: Problem, rank: int) -> list[Operand]:
    """See `Operator.operands`."""
    p, output = problem, problem.outputs[0]
    pairs = p.pairs_of(rank)
    return [
        *(Operand(pair.x, "input", p.m, pair.depth, p.dtype) for pair in pairs),
        *(weight_operand(p, output, pair.w, pair.depth, rank) for pair in pairs),
    ]


def expected_rows(problem: Problem, rank: int, owner: int, at: int) -> Iterator[Expected]:
    """Yield the sum of the rows of `owner`, which begin in the output of `rank` at row `at`."""
    p, output = problem, problem.outputs[0]
    down = offsets(p.rows)[owner] - at
    terms = [
        dot((s, x), False, down, (s, w), output.operand_transposed, 0, 0, (0, depth))
        for s in range(p.world)
        for x, w, depth in p.pairs_of(s)
        if depth
    ]
    if p.rows[owner]:
        content = combined([*terms, *bias_terms(p, 0, owner)])
        yield Expected("y0", at, at + p.rows[owner], 0, output.columns[rank], content)


def reference(
    problem: Problem, inputs: Sequence[Arrays], ranks: Sequence[int]
) -> list[list[Exact]]:
    """See `Operator.reference`."""
    whole = problem.flow.shares
    first = offsets(problem.rows)
    begin, end = (0, problem.m) if whole else (first[min(ranks)], first[max(ranks) + 1])
    value: Array = 0.0
    magnitude: Array = 0.0
    partial: Array = 0.0
    transposed = problem.outputs[0].operand_transposed
    for rank, arrays in enumerate(inputs):  # once for all rows of `ranks`
        for x, w, _ in problem.pairs_of(rank):
            b = wide(arrays[w])
            terms = terms_of(problem, arrays, begin, end)
            part = exact_product(wide(arrays[x][begin:end]), b.T if transposed else b, *terms)
            value = value + part.value
            magnitude = magnitude + part.magnitude
            partial = partial + abs(part.value)
    results = []
    for rank in ranks:
        rows = slice(0, end) if whole else slice(first[rank] - begin, first[rank + 1] - begin)
        extra = sum(rows_of(problem, inputs[rank], 0), 0.0)
        biased = whole or problem.pairs  # partial sums may include the bias
        travelled = partial[rows] + abs(extra) if biased else partial[rows]
        count = problem.k + problem.world
        results.append([Exact(value[rows] + extra, magnitude[rows] + abs(extra), travelled, count)])
    return results


def pose(
    op: str,
    library: Library,
    xs: Sequence[Array | Sequence[Array]],
    ws: Sequence[Array | Sequence[Array]],
    rows: Sequence[int] | None = None,
    bias: Sequence[Any] | None = None,
) -> Posed | list[list[Array]]:
    """Return the problem of x_r [m, k_r] and w_r [k_r, n], or several of each, and its inputs.

    Args:
        op: the name of the operator.
        library: of the arrays.
        xs: per rank an array or several.
        ws: per rank an array or several.
        rows: per rank, the rows of the sum that it gets; None: torch.chunk's rule.
        bias: per rank a bias, or None.
    """
    ranks, world = _pairs(xs, ws, library), len(xs)
    every = [pair for own in ranks for pair in own]
    check_summed(every)
    dtype = common_dtype([array for pair in every for array in (pair.x, pair.w)], "xs and ws")
    m, n = every[0].x.shape[0], every[0].w.shape[1]
    sizes = chunk_sizes(m, world) if rows is None else whole_numbers(rows, "rows")
    check_sum(sizes, "rows", world, m, "the rows of each of xs")
    pairs = tuple(tuple(pair.x.shape[1] for pair in own) for own in ranks)
    k = sum(map(sum, pairs))
    check_most("xs and ws", m=m, k=k, n=n)
    biases = biases_of(bias, [[own[0].w] for own in ranks], flat=True)
    offset = bias_rows(biases, (n,) * world, dtype, library)
    if not (m and k and n):  # nothing is sent
        heights = (m,) * world if registry.get(op).flow.shares else sizes
        return [
            [library.repeated((heights[rank], n), dtype, rank, offset and offset[rank])]
            for rank in range(world)
        ]
    problem = problem_of(op, sizes, n, pairs, dtype.name, offset is not None)
    arrays: list[dict[str, Array]] = []
    for rank, own in enumerate(ranks):
        arrays.append({})
        for i, pair in enumerate(own):
            x_name, w_name = _names(i)
            arrays[rank] |= {x_name: pair.x, w_name: pair.w}
        if offset is not None:
            arrays[rank]["bias0"] = offset[rank]
    return Posed(problem, arrays)


def problem_of(
    op: str,
    rows: tuple[int, ...],
    n: int,
    pairs: tuple[tuple[int, ...], ...],
    dtype: str,
    bias: bool = False,
) -> Problem:
    """Return the problem of the rows of every rank and the depths of its pairs."""
    world, depths = len(pairs), tuple([sum(own) for own in pairs])
    return Problem(
        op, world, rows, sum(depths), (Output((n,) * world, bias=bias),), dtype, depths=depths,
        pairs=pairs if max(map(len, pairs)) > 1 else (),
    )  # fmt: skip


def _names(i: int) -> tuple[str, str]:
    """Return the names of the buffers of pair i."""
    return f"x{i or ''}", f"w{i or ''}"


def _pairs(xs: Sequence[Any], ws: Sequence[Any], library: Library) -> list[list[Named]]:
    """Return every rank's pairs of x and w."""
    ranks: list[list[Named]] = []
    for rank, (x_entry, w_entry) in enumerate(zip(xs, ws, strict=True)):
        inputs, weights = listed(x_entry), listed(w_entry)
        if len(inputs) != len(weights) or not inputs:
            raise InputError(
                f"xs[{rank}] has {len(inputs)} matrices, ws[{rank}] has {len(weights)}: give pairs"
            )
        ranks.append([])
        for i, (x, w) in enumerate(zip(inputs, weights, strict=True)):
            x_name, w_name = entry_name("xs", rank, i, x_entry), entry_name("ws", rank, i, w_entry)
            matrices = matrix(x, x_name, rank, library), matrix(w, w_name, rank, library)
            ranks[-1].append(Named(x_name, matrices[0], w_name, matrices[1]))
    return ranks


# ---- the functions of PyTorch: x, w, bias, ...


def local(
    call: Any,
    x: Sequence[Array],
    w: Sequence[Array],
    bias: Array | None,
    sizes: tuple[int, ...],
    high: int,
    given: bool = False,
) -> Local | Array:
    """Return the call of this rank that adds up pairs.

    Args:
        call: the call of this rank.
        x: inputs of this rank.
        w: weights, one per input.
        bias: bias of this rank, or None.
        sizes: rows of matrices per rank.
        high: first dimension of the user's result.
        given: whether the user passes `sizes`, which are then equal on all ranks.
    """
    if len(x) != len(w):
        raise InputError(f"{len(x)} inputs, {len(w)} weights: give pairs of x and w")
    named = []
    for i, (a, b) in enumerate(zip(x, w, strict=True)):
        at = f"[{i}]" if len(x) > 1 else ""
        call.check(a, f"x{at}", 0)
        call.check(b, f"w{at}", 2)
        named.append(Named(f"x{at}", a, f"w{at}", b))
    check_summed(named)
    depths, n = [int(b.shape[0]) for b in w], w[0].shape[1]
    tensors = {_names(i)[0]: as_matrix(a) for i, a in enumerate(x)}
    tensors |= {_names(i)[1]: b for i, b in enumerate(w)}
    per_rank = size_for_this_rank(sum(depths), call.rank, call.world)
    if bias is not None:
        tensors["bias0"] = call.row(bias, n, "bias")
    m = sum(sizes)
    if not m or not n or not sum(per_rank):
        y = x[0].new_zeros((high, *call.inner, n))
        y = y if bias is None else y + tensors["bias0"][0]
        if call.world == 1 or (given and not m):  # the results of all ranks are empty
            return y
        empty = empty_columns(call.rank, "w") if m else empty_rows(call.rank)
        ones = ((1,),) * call.world
        other = problem_of(call.name, unequal_rows(sizes), 1, ones, call.dtype)
        return Local(*other_call(other, call.rank, x[0]), [y], empty)
    pairs = tuple([tuple(depths) if r == call.rank else (k,) for r, k in enumerate(per_rank)])
    problem = problem_of(call.name, sizes, n, pairs, call.dtype, bias is not None)
    return Local(problem, tensors)


def bias_gradient(kept: Kept, dy: Array, gradients: list[Any]) -> list[Any]:
    """Set the gradient of the bias, which is the last tensor; return all gradients."""
    if kept.needs[-1]:
        gradients[-1] = dy.sum(0).reshape(kept.shapes[-1])
    return gradients
