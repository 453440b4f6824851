"""Shared code of the operators of a mixture of experts, whose rows follow a routing table.

    dispatch_matmul    x_r [T_r, k]  ->  y_r [C_r, n]: rows of all ranks by expert, times weights
    matmul_combine     x_r [C_r, k]  ->  y_r [T_r, n]: per token the sum of the rows of its slots

Each rank has e experts w_r [e, k, n]. The routing table is data of a rank (`operators.routing`), so
its counts are no part of a problem. All sizes here are numbers that the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ficco.core.checking import whole_number
from ficco.core.errors import InputError, shown
from ficco.operators.arrays import Library, check_most, check_same_dtype, matrices
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output, check_per_rank
from ficco.operators.reference import is_tensor, library_of, wide
from ficco.operators.registry import Array, Arrays, Draw, Operand, Posed
from ficco.operators.routing import LARGEST_ID, MOST_EXPERTS, Routed, Table, parts_of, table
from ficco.operators.shapes import sized

EXPERTS, TOPK = 2, 2  # of a problem that `chunked` builds


def check(problem: Problem) -> None:
    """Reject wrong numbers of experts, slots and rows; see `Operator.check`."""
    p, (first, *others) = problem, problem.outputs
    whole_number(p.experts, "experts", 1, MOST_EXPERTS // p.world)
    whole_number(p.topk, "topk", 1, MOST_EXPERTS)
    check_per_rank("capacities", p.capacities, p.world)
    if min(p.capacities) < 1:
        raise InputError(f"capacities={shown(list(p.capacities))}: each is 1 or more")
    kept = p.flow.gathers and [output.axis for output in others] == ["gathered"]
    if first.axis != "rows" or first.bias or len(set(first.columns)) > 1 or (others and not kept):
        found = [(output.axis, output.columns, output.bias) for output in p.outputs]
        raise InputError(
            f"outputs: (axis, columns, bias) are {shown(found)}; {p.op} has one product along "
            "rows, with the same columns on every rank and no bias"
        )


def fields(world: int, m: int, n: int, k: int, rows: Sequence[int]) -> dict[str, Any]:
    """See `Operator.fields`."""
    return {
        "outputs": (Output((n,) * world),), "experts": EXPERTS, "topk": TOPK,
        "capacities": (m * TOPK,) * world,
    }  # fmt: skip


def operands(problem: Problem, rank: int) -> list[Operand]:
    """See `Operator.operands`."""
    p, output = problem, problem.outputs[0]
    rows = p.rows[rank] if p.flow.gathers else p.capacities[rank]
    inner, columns = p.k, output.columns[rank]
    shape = (columns, inner) if output.operand_transposed else (inner, columns)
    return [
        Operand("x", "input", rows, p.k, p.dtype),
        Operand("routing", "routing", 1, p.routed.length(rank), "int32"),
        Operand(output.operand, "experts", p.experts * shape[0], shape[1], p.dtype),
    ]


def drawn(problem: Problem, draw: Draw) -> list[dict[str, Array]]:
    """See `Operator.drawn`: the routing tables of random expert numbers."""
    sizes, world = problem.routed, problem.world
    ids = draw.integers(sizes.experts * world, sizes.slots, "int32")[0]
    return [{"routing": table(ids, sizes, rank).reshape(1, -1)} for rank in range(world)]


# ---- exact results


def routing_of(problem: Problem, arrays: Arrays, rank: int) -> Table:
    """Return the parts of a rank's routing table, of its inputs."""
    return parts_of(arrays["routing"][0], problem.routed, rank)


def weights_of(problem: Problem, arrays: Arrays) -> Array:
    """Return the weights of a rank's experts, [e, k, n], in float64."""
    output, w = problem.outputs[0], wide(arrays[problem.outputs[0].operand])
    if output.operand_transposed:
        return w.reshape(problem.experts, -1, problem.k).swapaxes(1, 2)
    return w.reshape(problem.experts, problem.k, -1)


def by_expert(routing: Table, w: Array, rows: Array, value: Array) -> None:
    """Store rows, in the order of the list, times the weights of their experts in `value`."""
    begin = 0
    for e, edge in enumerate(routing.ends.tolist()):
        end = min(edge, len(rows))
        if begin < end:
            value[begin:end] = rows[begin:end] @ w[e]
        begin = end


def zeros(like: Array, rows: int, cols: int) -> Array:
    """Return zeros in float64 where `like` is."""
    if is_tensor(like):
        return like.new_zeros((rows, cols), dtype=library_of(like).float64)
    return library_of(like).zeros((rows, cols))


# ---- calls of a Node


def pose(
    name: str,
    library: Library,
    xs: Sequence[Array],
    ids: Sequence[Array],
    ws: Sequence[Array],
    capacity: int | None = None,
) -> Posed:
    """Return the problem of x_r, expert numbers [T_r, topk] and w_r [e, k, n], and its inputs."""
    from ficco.operators.registry import get

    shards, gathers = matrices(xs, "xs", library), get(name).flow.gathers
    numbers = [_checked_ids(each, f"ids[{rank}]") for rank, each in enumerate(ids)]
    topk = numbers[0].shape[1]
    rows = tuple(len(each) for each in numbers)
    weights = [_stack(w, f"ws[{rank}]", rank, library) for rank, w in enumerate(ws)]
    experts, k, n = weights[0].shape
    for rank, (x, each, w) in enumerate(zip(shards, numbers, weights, strict=True)):
        check_same_dtype(x, shards[0].dtype, f"xs[{rank}]")
        check_same_dtype(w, shards[0].dtype, f"ws[{rank}]")
        if each.shape[1] != topk:
            raise InputError(f"ids[{rank}] has {each.shape[1]} columns, ids[0] has {topk}")
        check_shapes(f"xs[{rank}]", x, f"ws[{rank}]", w, (experts, k, n))
        if gathers and len(x) != len(each):
            raise InputError(f"xs[{rank}] {sized(x)}, ids[{rank}] {sized(each)}: one row per token")
    check_most("xs and ws", m=sum(rows), k=k, n=n)
    sizes = Routed(experts, topk, rows)
    most = max(sizes.slots, 1) if capacity is None else whole_number(capacity, "capacity", 1)
    capacities = (most,) * len(xs) if gathers else tuple(len(x) for x in shards)
    outputs = (Output((n,) * len(xs)),)
    dtype = shards[0].dtype.name
    problem = Problem(
        name, len(xs), rows, k, outputs, dtype, experts=experts, topk=topk, capacities=capacities
    )
    flat = _joined(numbers)
    arrays = [
        {
            "x": library.contiguous(x),
            "routing": library.placed(table(flat, sizes, rank).reshape(1, -1), rank),
            "w": library.contiguous(w).reshape(experts * k, n),
        }
        for rank, (x, w) in enumerate(zip(shards, weights, strict=True))
    ]
    return Posed(problem, arrays)


def check_shapes(x_name: str, x: Array, w_name: str, w: Array, shape: Sequence[int]) -> None:
    """Check rows x [rows, k] and the weights of experts w [e, k, n] against `shape`, [e, k, n]."""
    if tuple(w.shape) != tuple(shape) or x.shape[1] != shape[1]:
        e, k, n = shape
        raise InputError(
            f"{x_name} {sized(x)}, {w_name} {sized(w)}; with {e} experts of k={k} and n={n} x is "
            "[rows, k], w is [experts, k, n]"
        )


def _checked_ids(ids: Any, name: str) -> Any:
    """Return the expert numbers of a rank's tokens; they are NumPy arrays, which the host reads."""
    kind = getattr(getattr(ids, "dtype", None), "kind", "")
    if type(ids).__module__ != "numpy" or kind not in "iu" or ids.ndim != 2 or not ids.shape[1]:
        found = f"{ids.dtype} of shape {ids.shape}" if kind else type(ids).__name__
        raise InputError(
            f"{name}: {found} found; a NumPy array of integers [tokens, topk] is needed"
        )
    return ids


def _stack(w: Any, name: str, rank: int, library: Library) -> Array:
    """Check the weights of a rank's experts."""
    refusal = library.refusal(w, rank)
    if refusal is not None:
        raise InputError(name + refusal)
    if w.ndim != 3 or not all(w.shape):
        raise InputError(f"{name} {sized(w)}; the weights of experts are [experts, k, n]")
    checked: Array = w
    return checked


def _joined(numbers: Sequence[Any]) -> Any:
    library = library_of(numbers[0])
    narrow = [each.clip(None, LARGEST_ID) if each.itemsize > 4 else each for each in numbers]
    flat = [each.reshape(-1).astype("int64") for each in narrow]
    return library.concatenate(flat).clip(-1, LARGEST_ID)
