"""all_gather_matmul: x_r [m_r, k] and w_r [k, n_r] give concat over s of (x_s) . w_r [m, n_r].

Several weights may share the gather. A weight w_r [m, n_r] along the contraction gives
concat(x)^T . w_r [k, n_r] (a weight gradient). The gathered x may also be an output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ficco.core.errors import InputError
from ficco.operators import blocks
from ficco.operators.arrays import (
    Library,
    bias_rows,
    biases_of,
    check_most,
    check_same_dtype,
    common_dtype,
    entry_name,
    equal_columns,
    listed,
    matrices,
    matrix,
    row_contiguous,
)
from ficco.operators.functions import (
    CALL,
    WEIGHTS,
    add_bias_gradients,
    as_matrix,
    empty_columns,
    empty_rows,
    flat_weights,
    keep_weights,
    nested_weights,
    other_call,
    size_for_this_rank,
    unequal_rows,
    weight_flops,
    weight_name,
)
from ficco.operators.problem import Problem, chunk_sizes, offsets
from ficco.operators.problem_checks import Output
from ficco.operators.products import bias_terms, weight_operand
from ficco.operators.reference import (
    exact_product,
    library_of,
    rows_of,
    weight_of,
    wide,
    zero_of,
)
from ficco.operators.registry import (
    Array,
    Arrays,
    Exact,
    Expected,
    Flow,
    Function,
    Kept,
    Local,
    Operand,
    Operator,
    Posed,
)
from ficco.operators.shapes import check_weight, checked_axes
from ficco.operators.symbolic import Source, combined, dot


def _fields(world: int, m: int, n: int, k: int, rows: Sequence[int]) -> dict[str, Any]:
    return {"outputs": (Output(chunk_sizes(n, world)),)}


def _inner(problem: Problem, output: Output) -> int:
    """Return the height of an output's weight."""
    return problem.m if output.axis == "contraction" else problem.k


def _result_shapes(problem: Problem, rank: int) -> list[tuple[int, int]]:
    return [
        (problem.k if output.axis == "contraction" else problem.m, output.columns[rank])
        for output in problem.outputs
    ]


def _operands(problem: Problem, rank: int) -> list[Operand]:
    p = problem
    weights = {
        output.operand: weight_operand(p, output, output.operand, _inner(p, output), rank)
        for output in p.products
    }
    return [Operand("x", "input", p.rows[rank], p.k, p.dtype), *weights.values()]


def _meaning(problem: Problem, rank: int) -> Iterator[Expected]:
    for i, output in enumerate(problem.outputs):
        if output.axis == "contraction":
            yield from _along_contraction(problem, rank, i)
        else:
            yield from _along_rows(problem, rank, i)


def _along_rows(p: Problem, rank: int, i: int) -> Iterator[Expected]:
    """Yield the rows of every rank's x, or their products."""
    output, first = p.outputs[i], offsets(p.rows)
    columns, weight = output.columns[rank], (rank, output.operand)
    for s in range(p.world):
        if not p.rows[s] or not columns:
            continue
        if output.axis == "gathered":
            yield Expected(f"y{i}", first[s], first[s + 1], 0, p.k, Source((s, "x"), -first[s], 0))
            continue
        term = dot((s, "x"), False, -first[s], weight, output.operand_transposed, 0, 0, (0, p.k))
        content = combined([term, *bias_terms(p, i, rank)])
        yield Expected(f"y{i}", first[s], first[s + 1], 0, columns, content)


def _along_contraction(p: Problem, rank: int, i: int) -> Iterator[Expected]:
    """Yield the sum over s of x_s^T times the weight's rows of rank s."""
    output, first = p.outputs[i], offsets(p.rows)
    columns, weight = output.columns[rank], (rank, output.operand)
    terms = [
        dot((s, "x"), True, 0, weight, output.operand_transposed, 0, first[s], (0, p.rows[s]))
        for s in range(p.world)
        if p.rows[s]
    ]
    if columns:
        content = combined([*terms, *bias_terms(p, i, rank)])
        yield Expected(f"y{i}", 0, p.k, 0, columns, content)


def _reference(
    problem: Problem, inputs: Sequence[Arrays], ranks: Sequence[int]
) -> list[list[Exact]]:
    x, *terms = (
        library_of(inputs[0][name]).concatenate([wide(arrays[name]) for arrays in inputs])
        for name in ("x", *[term.name for term in problem.attached(0, "x")])
    )
    return [
        [
            _reference_of_output(problem, x, inputs[rank], i, terms)
            for i in range(len(problem.outputs))
        ]
        for rank in ranks
    ]


def _reference_of_output(
    problem: Problem, x: Array, inputs: Arrays, i: int, terms: Sequence[Array]
) -> Exact:
    axis = problem.outputs[i].axis
    if axis == "gathered":
        return Exact(x, abs(x), zero_of(x), 0)
    a = x.T if axis == "contraction" else x
    return exact_product(a, weight_of(problem, inputs, i), *terms, *rows_of(problem, inputs, i))


def _pose(
    name: str,
    library: Library,
    xs: Sequence[Array],
    ws: Sequence[Array | Sequence[Array]],
    bias: Sequence[Any] | None = None,
    axes: Sequence[str] | None = None,
) -> Posed | list[list[Array]]:
    """Return the problem of x_r [m_r, k] and one or several weights per rank, and its inputs."""
    shards = matrices(xs, "xs", library)
    weights = [
        [matrix(w, entry_name("ws", r, i, entry), r, library) for i, w in enumerate(listed(entry))]
        for r, entry in enumerate(ws)
    ]
    dtype, k = common_dtype(shards, "xs"), shards[0].shape[1]
    rows = tuple(x.shape[0] for x in shards)
    equal_columns(shards, "xs", "m_r, k")
    m = sum(rows)
    kinds = checked_axes(axes, len(weights[0]))
    biases = biases_of(bias, weights)
    arrays = [{"x": row_contiguous(x, library)} for x in shards]
    outputs = []
    for i, axis in enumerate(kinds):
        _check_weights(weights, ws, i, axis, (m, k), dtype)
        columns = tuple(entry[i].shape[1] for entry in weights)
        offset = bias_rows([entry[i] for entry in biases], columns, dtype, library)
        operand = "w" if len(kinds) == 1 else f"w{i}"
        outputs.append(Output(columns, operand, axis, bias=offset is not None))
        for rank in range(len(xs)):
            arrays[rank][operand] = weights[rank][i]
            if offset is not None:
                arrays[rank][f"bias{i}"] = offset[rank]
    if not outputs:
        raise InputError("ws: no weight found; each rank needs one or more")
    check_most("xs and ws", m=m, k=k, n=max(max(output.columns) for output in outputs))
    if not (m and k and any(sum(output.columns) for output in outputs)):
        return [_empty(outputs, arrays[rank], (m, k), rank, library) for rank in range(len(xs))]
    problem = Problem(name, len(xs), rows, k, tuple(outputs), dtype=dtype.name)
    return Posed(problem, arrays)


def _empty(
    outputs: Sequence[Output],
    arrays: dict[str, Array],
    size: tuple[int, int],
    rank: int,
    library: Library,
) -> list[Array]:
    """Return a rank's products where the gathered x [m, k], or every weight, is empty."""
    m, k = size
    dtype = arrays["x"].dtype
    return [
        library.repeated(
            (k if output.axis == "contraction" else m, output.columns[rank]), dtype, rank,
            arrays.get(f"bias{i}"),
        )
        for i, output in enumerate(outputs)
    ]  # fmt: skip


def _check_weights(
    weights: list[list[Array]],
    ws: Sequence[Any],
    i: int,
    axis: str,
    size: tuple[int, int],
    dtype: Any,
) -> None:
    """Check weight i of every rank against the gathered x, [m, k]."""
    m, k = size
    inner, count = m if axis == "contraction" else k, len(weights[0])
    for rank, entry in enumerate(weights):
        name = entry_name("ws", rank, i, ws[rank])
        if len(entry) != count:
            raise InputError(f"ws[{rank}] has {len(entry)} weights, ws[0] has {count}")
        check_same_dtype(entry[i], dtype, name)
        check_weight(entry[i], name, inner, f"m={m}, k={k} and axis {axis!r}")


# ---- the function of PyTorch: x, w, bias, biased, axes, rows, gathered, group, schedule, grain


def _shapes(ranks: Callable[[str], tuple[int, int]], *arguments: Any) -> list[Array]:
    x, w, _, _, axes, rows, gathered, group, *_ = arguments
    first = sum(rows) if rows is not None else x.shape[0] * ranks(group)[1]
    kinds = axes if axes is not None else ["rows"] * len(w)
    results = [
        x.new_empty((x.shape[-1], weight.shape[1]))
        if axis == "contraction"
        else x.new_empty((first, *x.shape[1:-1], weight.shape[1]))
        for weight, axis in zip(w, kinds, strict=True)
    ]
    if gathered:
        results.append(x.new_empty((first * math.prod(x.shape[1:-1]), x.shape[-1])))
    return results


def _local(
    call: Any,
    x: Array,
    w: Sequence[Array],
    bias: Sequence[Array],
    biased: Sequence[bool],
    axes: Sequence[str] | None,
    rows: Sequence[int] | None,
    gathered: bool,
) -> Local | list[Array]:
    """Return a product per weight; if `gathered`, also the concatenation of all x, as a matrix.

    `biased` has an entry per weight: whether it has a bias.
    """
    if len(w) != len(biased) or not w:
        raise InputError(f"{len(w)} weights, {len(biased)} biases: give one of each")
    kinds = checked_axes(axes, len(w))
    sizes = call.rows_of(rows)
    m, k = sum(sizes), x.shape[-1]
    outputs, tensors, offset = [], {"x": call.matrix}, iter(bias)
    for i, (weight, has, axis) in enumerate(zip(w, biased, kinds, strict=True)):
        name, inner = weight_name(i, len(w)), m if axis == "contraction" else k
        call.check(weight, name, 2)
        check_weight(weight, name, inner, f"m={m}, k={k} and axis {axis!r}")
        columns = size_for_this_rank(weight.shape[1], call.rank, call.world)
        outputs.append(Output(columns, f"w{i}", axis, bias=has))
        tensors[f"w{i}"] = weight
    for i, has in enumerate(biased):
        if has:
            tensors[f"bias{i}"] = call.row(next(offset), w[i].shape[1], f"bias[{i}]")
    if gathered:
        outputs.append(Output((k,) * call.world, "", "gathered"))
    alone = call.world == 1 and not all(output.columns[0] for output in outputs)
    if not m or not k or alone:
        high = sum(rows) if rows is not None else call.first * call.world
        whole = call.matrix if alone else call.matrix.new_zeros((m, k))
        results = _local_products(call, outputs, tensors, whole, high)
        if call.world == 1 or (k and rows is not None):  # no other rank has rows
            return results
        pass_rows = "; pass rows= on all ranks if others have some"
        empty = empty_rows(call.rank, pass_rows) if k else empty_columns(call.rank, "x")
        one = (Output((1,) * call.world, "w0"),)
        other = Problem(call.name, call.world, unequal_rows(sizes), 1, one, call.dtype)
        return Local(*other_call(other, call.rank, call.matrix), results, empty)
    return Local(Problem(call.name, call.world, sizes, k, tuple(outputs), call.dtype), tensors)


def _local_products(
    call: Any, outputs: Sequence[Output], tensors: Arrays, whole: Array, high: int
) -> list[Array]:
    """Return the products of a gathered x that needs no other rank, for example an empty one.

    `high` is the first dimension of the user's result.
    """
    results = []
    for i, output in enumerate(outputs):
        if output.axis == "gathered":
            results.append(whole.clone())
            continue
        y = (whole.t() if output.axis == "contraction" else whole) @ tensors[output.operand]
        y = y + tensors[f"bias{i}"] if output.bias else y
        shape = (high, *call.inner, y.shape[1])
        results.append(y if output.axis == "contraction" else call.viewed(y, shape))
    return results


def _gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """Along rows, y = X w: dx sums dy w^T over ranks, dw = X^T dy.

    Along the contraction, y = X^T w: dx sums w dy^T, dw = X dy.
    """
    x, *ws = kept.tensors
    biased, axes, rows, gathered, *rest = kept.rest
    several = len(biased)
    axes = axes or ["rows"] * several
    shape = kept.shapes[0]
    if rows is not None:
        rows = [r * math.prod(shape[1:-1]) for r in rows]
    dy_matrices = [call.matrix(dy) for dy in dys[:several]]
    gradients: list[Any] = [None] * len(kept.shapes)
    if kept.needs[0]:
        pairs = [
            (dy, w.t()) if axis == "rows" else (w, dy.t())
            for dy, w, axis in zip(dy_matrices, ws, axes, strict=True)
            if dy is not None
        ]
        first, second = [a for a, _ in pairs], [b for _, b in pairs]
        dx = call.mirror("matmul_reduce_scatter", (first, second, None, rows, *rest))
        gradients[0] = dx.reshape(shape)
    wanted = [i for i in range(several) if dy_matrices[i] is not None and kept.needs[1 + i]]
    if wanted:
        mirrored = ["contraction" if axes[i] == "rows" else "rows" for i in wanted]
        operands = [dy_matrices[i] for i in wanted]
        if gathered:
            dws = call.multiply(x, operands, mirrored, kept.sink)
        else:
            dws = call.gather(as_matrix(x), operands, mirrored, (rows, *rest))
            dws = dws if kept.sink is None else map(kept.sink.add, dws)
        for i, dw in zip(wanted, dws, strict=True):
            gradients[1 + i] = dw
    add_bias_gradients(kept, dy_matrices, gradients, biased)
    return gradients


def _visible(rest: Sequence[Any]) -> int:
    return len(rest[0])  # a gathered x is only for backward


OPERATOR = Operator(
    name="all_gather_matmul",
    label="AG+mm",
    about="gather x of all ranks, and multiply it with the weights of the rank",
    flow=Flow(
        "gather", "products", "multiply", "all_gather", own_columns=True, one_kernel="gather"
    ),
    schedules=("gather_sm", "push_sm", "whole_sm"),
    fields=_fields,
    result_shapes=_result_shapes,
    operands=_operands,
    meaning=_meaning,
    blocks=blocks.gathered,
    reference=_reference,
    pose=_pose,
    function=Function(
        name="all_gather_matmul",
        schema=f"(Tensor x, {WEIGHTS}, str[]? axes, SymInt[]? rows, bool gathered, {CALL})"
        " -> Tensor[]",
        shapes=_shapes,
        flat=flat_weights,
        nested=nested_weights,
        local=_local,
        flops=weight_flops,
        keep=keep_weights,
        gradient=_gradient,
        visible=_visible,
        several=True,
    ),
)
