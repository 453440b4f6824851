"""Shared code of the operators that add up products of all ranks: x_r [m, k_r], w_r [k_r, n].

A rank may have several pairs of x and w, whose products are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ficco.checking import check_sum, whole_numbers
from ficco.errors import InputError, shown
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
    size_for_this_rank,
    unequal_rows,
)
from ficco.operators.products import (
    bias_operand,
    bias_terms,
    check_one_output,
    draw_weight,
    one_output,
    weight_operand,
)
from ficco.operators.reference import bias_of, exact_product, wide
from ficco.problem import Output, Problem, check_per_rank, chunk_sizes, offsets
from ficco.registry import Array, Arrays, Draw, Exact, Expected, Kept, Local, Operand, Posed
from ficco.symbolic import combined, dot

__all__ = [
    "bias_gradient",
    "check",
    "expected_rows",
    "fields",
    "inputs",
    "local",
    "operands",
    "pose",
    "reference",
]


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
        Operand("y0", "output", *p.result_shapes(rank)[0], p.dtype),
        *(weight_operand(p, output, pair.w, pair.depth, rank) for pair in pairs),
        *bias_operand(p, 0, rank),
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


def inputs(problem: Problem, rank: int, draw: Draw) -> dict[str, Array]:
    """See `Operator.inputs`."""
    output, pairs = problem.outputs[0], problem.pairs_of(rank)
    arrays = {x: draw.normal(problem.m, depth) for x, _, depth in pairs}
    arrays |= {w: draw_weight(problem, output, depth, rank, draw) for _, w, depth in pairs}
    if output.bias:
        arrays["bias0"] = draw.normal(1, output.columns[rank])
    return arrays


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
            part = exact_product(wide(arrays[x][begin:end]), b.T if transposed else b)
            value = value + part.value
            magnitude = magnitude + part.magnitude
            partial = partial + abs(part.value)
    results = []
    for rank in ranks:
        rows = slice(0, end) if whole else slice(first[rank] - begin, first[rank + 1] - begin)
        bias = bias_of(problem, inputs[rank], 0)
        extra = 0.0 if bias is None else bias
        biased = whole or problem.pairs  # partial sums may include the bias
        travelled = partial[rows] + abs(extra) if biased else partial[rows]
        terms = problem.k + problem.world
        results.append([Exact(value[rows] + extra, magnitude[rows] + abs(extra), travelled, terms)])
    return results


def pose(
    op: str,
    library: Library,
    xs: Sequence[Array | Sequence[Array]],
    ws: Sequence[Array | Sequence[Array]],
    rows: Sequence[int] | None,
    bias: Sequence[Any] | None,
    whole: bool = False,
) -> Posed | list[list[Array]]:
    """Return the problem of x_r [m, k_r] and w_r [k_r, n], or several of each, and its inputs.

    Args:
        op: the name of the operator.
        library: of the arrays.
        xs: per rank an array or several.
        ws: per rank an array or several.
        rows: per rank, the rows of the sum that it gets; None: torch.chunk's rule.
        bias: per rank a bias, or None.
        whole: whether every rank gets the whole sum.
    """
    arrays, m, n = _pairs(xs, ws, library)
    world = len(xs)
    matrices = [array for inputs in arrays for array in inputs.values()]
    dtype = common_dtype(matrices, "xs and ws")
    sizes = chunk_sizes(m, world) if rows is None else whole_numbers(rows, "rows")
    check_sum(sizes, "rows", world, m, "the rows of each of xs")
    pairs = tuple(
        tuple(array.shape[1] for name, array in inputs.items() if name.startswith("x"))
        for inputs in arrays
    )
    depths = tuple(sum(rank_depths) for rank_depths in pairs)
    k = sum(depths)
    check_most("xs and ws", m=m, k=k, n=n)
    columns = (n,) * world
    biases = biases_of(bias, [[inputs["w"]] for inputs in arrays], flat=True)
    offset = bias_rows(biases, columns, dtype, library)
    if not (m and k and n):  # nothing is sent
        return [
            [
                library.repeated(
                    (m if whole else sizes[rank], n), dtype, rank, offset and offset[rank]
                )
            ]
            for rank in range(world)
        ]
    problem = Problem(
        op, world, sizes, k, (Output(columns, bias=offset is not None),), dtype.name,
        depths=depths, pairs=pairs if max(map(len, pairs)) > 1 else (),
    )  # fmt: skip
    for rank, row in enumerate(offset or ()):
        arrays[rank]["bias0"] = row
    return Posed(problem, arrays)


def _pairs(
    xs: Sequence[Any], ws: Sequence[Any], library: Library
) -> tuple[list[dict[str, Array]], int, int]:
    """Return every rank's x, w, x1, w1, ... by name, and their common rows and columns."""
    arrays: list[dict[str, Array]] = []
    m, n = -1, -1
    for rank, (x_entry, w_entry) in enumerate(zip(xs, ws, strict=True)):
        inputs, weights = listed(x_entry), listed(w_entry)
        if len(inputs) != len(weights) or not inputs:
            raise InputError(
                f"xs[{rank}] has {len(inputs)} matrices, ws[{rank}] has {len(weights)}: give pairs"
            )
        named: dict[str, Array] = {}
        for i, (one, other) in enumerate(zip(inputs, weights, strict=True)):
            x_name, w_name = entry_name("xs", rank, i, x_entry), entry_name("ws", rank, i, w_entry)
            x, w = matrix(one, x_name, rank, library), matrix(other, w_name, rank, library)
            m, n = (x.shape[0], w.shape[1]) if m < 0 else (m, n)
            if x.shape[0] != m:
                raise InputError(f"{x_name} has {x.shape[0]} rows, xs[0] has {m}; all are [m, k_r]")
            if w.shape[1] != n:
                raise InputError(
                    f"{w_name} has {w.shape[1]} columns, ws[0] has {n}; all are [k_r, n]"
                )
            if x.shape[1] != w.shape[0]:
                raise InputError(
                    f"{x_name} has {x.shape[1]} columns, {w_name} has {w.shape[0]} rows; "
                    "x_r is [m, k_r], w_r is [k_r, n] (pass linear.weight.T)"
                )
            named |= {f"x{i or ''}": x, f"w{i or ''}": w}
        arrays.append(named)
    return arrays, m, n


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
    depths = [_check_pair(call, x, w, i) for i in range(len(x))]
    n = w[0].shape[1]
    tensors = {f"x{i or ''}": as_matrix(a) for i, a in enumerate(x)}
    tensors |= {f"w{i or ''}": b for i, b in enumerate(w)}
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
        return Local(*_other_call(call, x[0], sizes), [y], empty)
    pairs = tuple([tuple(depths) if r == call.rank else (k,) for r, k in enumerate(per_rank)])
    output = Output((n,) * call.world, bias=bias is not None)
    problem = Problem(
        call.name, call.world, sizes, sum(per_rank), (output,), call.dtype, depths=per_rank,
        pairs=pairs if len(depths) > 1 else (),
    )  # fmt: skip
    return Local(problem, tensors)


def _other_call(call: Any, like: Array, sizes: Sequence[int]) -> tuple[Problem, dict[str, Array]]:
    """Return a small call that only ranks with empty results make; see `unequal_rows`."""
    rows, ones = unequal_rows(sizes), (1,) * call.world
    problem = Problem(
        call.name, call.world, rows, call.world, (Output(ones),), call.dtype, depths=ones
    )
    return problem, {"x": like.new_zeros((sum(rows), 1)), "w": like.new_zeros((1, 1))}


def _check_pair(call: Any, x: Sequence[Array], w: Sequence[Array], i: int) -> int:
    """Check pair i against the first pair; return its depth."""
    a, b, at = x[i], w[i], f"[{i}]" if len(x) > 1 else ""
    call.check(a, f"x{at}", 0)
    call.check(b, f"w{at}", 2)
    if a.shape[:-1] != x[0].shape[:-1] or b.shape[1] != w[0].shape[1]:
        raise InputError(
            f"x[{i}] is {list(a.shape)}, w[{i}] is {list(b.shape)}; with x[0] "
            f"{list(x[0].shape)} and w[0] {list(w[0].shape)} they may differ only in k_r"
        )
    if a.shape[-1] != b.shape[0]:
        raise InputError(
            f"x{at} has {a.shape[-1]} columns, w{at} is {list(b.shape)}; x is [m, k_r], w is "
            "[k_r, n] (pass linear.weight.t())"
        )
    return int(b.shape[0])


def bias_gradient(kept: Kept, dy: Array, gradients: list[Any]) -> list[Any]:
    """Set the gradient of the bias, which is the last tensor; return all gradients."""
    if kept.needs[-1]:
        gradients[-1] = dy.sum(0).reshape(kept.shapes[-1])
    return gradients
