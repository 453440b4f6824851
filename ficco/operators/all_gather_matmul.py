"""all_gather_matmul: from x_r [m_r, k] and w_r [k, n_r], concat over s of x_s, . w_r [m, n_r].

Several weights may share the gather. One along the contraction gives concat(x)^T . w_r [k, n_r]
with w_r [m, n_r] (a weight gradient). The gathered x may be an output itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ficco.errors import InputError
from ficco.operators import blocks
from ficco.operators.arrays import (
    Library,
    bias_rows,
    biases_of,
    check_same_dtype,
    common_dtype,
    entry_name,
    equal_columns,
    listed,
    matrices,
    matrix,
    row_contiguous,
)
from ficco.operators.products import bias_operand, bias_terms, draw_weight, weight_operand
from ficco.operators.reference import (
    bias_of,
    exact_product,
    library_of,
    weight_of,
    wide,
    zero_of,
)
from ficco.problem import Output, Problem, chunk_sizes, offsets
from ficco.registry import Array, Arrays, Draw, Exact, Expected, Flow, Operand, Operator, Posed
from ficco.symbolic import Source, combined, dot

__all__ = ["OPERATOR"]


def _check(problem: Problem) -> None:
    """Nothing is refused beyond what every problem refuses."""


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
    p, shapes = problem, problem.result_shapes(rank)
    operands = {"x": Operand("x", "input", p.rows[rank], p.k, p.dtype)}
    for i, output in enumerate(p.outputs):
        operands[f"y{i}"] = Operand(f"y{i}", "output", *shapes[i], p.dtype)
        if output.axis != "gathered":
            name = output.operand
            operands[name] = weight_operand(p, output, name, _inner(p, output), rank)
            operands |= {bias.name: bias for bias in bias_operand(p, i, rank)}
    return list(operands.values())


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
    """Yield the sum of x_s^T times the rows of the weight that belong to rank s."""
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


def _inputs(problem: Problem, rank: int, draw: Draw) -> dict[str, Array]:
    inputs: dict[str, Array] = {"x": draw.normal(problem.rows[rank], problem.k)}
    for i, output in enumerate(problem.outputs):
        if output.axis == "gathered":
            continue
        w = draw_weight(problem, output, _inner(problem, output), rank, draw)
        inputs.setdefault(output.operand, w)
        if output.bias:
            inputs[f"bias{i}"] = draw.normal(1, output.columns[rank])
    return inputs


def _reference(
    problem: Problem, inputs: Sequence[Arrays], ranks: Sequence[int]
) -> list[list[Exact]]:
    x = library_of(inputs[0]["x"]).concatenate([wide(arrays["x"]) for arrays in inputs])
    return [
        [_reference_of_output(problem, x, inputs[rank], i) for i in range(len(problem.outputs))]
        for rank in ranks
    ]


def _reference_of_output(problem: Problem, x: Array, inputs: Arrays, i: int) -> Exact:
    axis = problem.outputs[i].axis
    if axis == "gathered":
        return Exact(x, abs(x), zero_of(x), 0)
    a = x.T if axis == "contraction" else x
    return exact_product(a, weight_of(problem, inputs, i), bias_of(problem, inputs, i))


def _pose(
    library: Library,
    xs: Sequence[Array],
    ws: Sequence[Array | Sequence[Array]],
    bias: Sequence[Any] | None = None,
    axes: Sequence[str] | None = None,
) -> Posed:
    """Return the problem of x_r [m_r, k] and one or several weights a rank, and its inputs."""
    shards = matrices(xs, "xs", library)
    weights = [
        [matrix(w, entry_name("ws", r, i, entry), r, library) for i, w in enumerate(listed(entry))]
        for r, entry in enumerate(ws)
    ]
    dtype, k = common_dtype(shards, "xs"), shards[0].shape[1]
    rows = tuple(x.shape[0] for x in shards)
    equal_columns(shards, "xs", "m_r, k")
    if k < 1 or sum(rows) < 1:
        raise InputError(f"xs: m={sum(rows)}, k={k}; there is nothing to gather")
    kinds = _axes(axes, len(weights[0]))
    biases = biases_of(bias, weights)
    arrays = [{"x": row_contiguous(x, library)} for x in shards]
    outputs = []
    for i, axis in enumerate(kinds):
        _check_weights(weights, ws, i, axis, (sum(rows), k), dtype)
        columns = tuple(entry[i].shape[1] for entry in weights)
        offset = bias_rows([entry[i] for entry in biases], columns, dtype, library)
        operand = "w" if len(kinds) == 1 else f"w{i}"
        outputs.append(Output(columns, operand, axis, bias=offset is not None))
        for rank in range(len(xs)):
            arrays[rank][operand] = weights[rank][i]
            if offset is not None:
                arrays[rank][f"bias{i}"] = offset[rank]
    problem = Problem(OPERATOR.name, len(xs), rows, k, tuple(outputs), dtype=dtype.name)
    return Posed(problem, arrays)


def _axes(axes: Any, count: int) -> Sequence[str]:
    if axes is None:
        return ("rows",) * count
    if not isinstance(axes, (tuple, list)):
        raise InputError(f"axes={axes!r:.80}: a list is needed, 'rows' or 'contraction' a weight")
    if len(axes) != count:
        raise InputError(f"axes has {len(axes)} entries, there are {count} weights a rank")
    for i, axis in enumerate(axes):
        if axis not in ("rows", "contraction"):
            raise InputError(f"axes[{i}]={axis!r}: it is 'rows' or 'contraction'")
    return axes


def _check_weights(
    weights: list[list[Array]],
    ws: Sequence[Any],
    i: int,
    axis: str,
    size: tuple[int, int],
    dtype: Any,
) -> None:
    """Hold weight i of every rank against the gathered x, [m, k]."""
    m, k = size
    inner, count = m if axis == "contraction" else k, len(weights[0])
    for rank, entry in enumerate(weights):
        name = entry_name("ws", rank, i, ws[rank])
        if len(entry) != count:
            raise InputError(f"ws[{rank}] has {len(entry)} weights, ws[0] has {count}")
        check_same_dtype(entry[i], dtype, name)
        if entry[i].shape[0] != inner:
            raise InputError(
                f"{name} has shape {entry[i].shape}; with xs of m={m}, k={k} and axis {axis!r} it "
                f"is [{inner}, n_r] (pass linear.weight.T)"
            )


OPERATOR = Operator(
    name="all_gather_matmul",
    label="AG+mm",
    flow=Flow(
        "gather", "products", "multiply", "all_gather", own_columns=True, one_kernel="gather"
    ),
    schedules=("gather_sm",),
    check=_check,
    fields=_fields,
    result_shapes=_result_shapes,
    operands=_operands,
    meaning=_meaning,
    blocks=blocks.gathered,
    inputs=_inputs,
    reference=_reference,
    pose=_pose,
)
