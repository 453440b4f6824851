"""matmul_combine: rows x_r [C_r, k] of rank r's experts and w_r [e, k, n] give y_r [T_r, n].

Each row times the weight of its expert returns to the rank of its token. There the rows of a
token's slots are added up, in the order of slots. The last GEMM of a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ficco.operators import blocks, expert_functions, experts
from ficco.operators.problem import Problem, offsets
from ficco.operators.reference import library_of, wide
from ficco.operators.registry import Array, Arrays, Exact, Expected, Flow, Operator
from ficco.operators.symbolic import Source, combined, combined_name


def _result_shapes(problem: Problem, rank: int) -> list[tuple[int, int]]:
    return [(problem.rows[rank], problem.outputs[0].columns[rank])]


def _meaning(problem: Problem, rank: int) -> Iterator[Expected]:
    p, output, rows = problem, problem.outputs[0], problem.rows[rank]
    first = offsets(p.rows)[rank]
    name = combined_name(output.operand)
    content = combined([Source((s, name), first, 0) for s in range(p.world)])
    if rows:
        yield Expected("y0", 0, rows, 0, output.columns[rank], content)


def _reference(
    problem: Problem, inputs: Sequence[Arrays], ranks: Sequence[int]
) -> list[list[Exact]]:
    p, n = problem, problem.outputs[0].columns[0]
    value, magnitude = (experts.zeros(inputs[0]["x"], p.routed.slots, n) for _ in range(2))
    for rank, arrays in enumerate(inputs):
        _return(p, arrays, rank, value, magnitude)
    first = [p.routed.first_slot(rank) for rank in range(p.world + 1)]
    return [
        [_sums(p, inputs[rank], rank, value[first[rank] : first[rank + 1]],
               magnitude[first[rank] : first[rank + 1]])]
        for rank in ranks
    ]  # fmt: skip


def _return(p: Problem, arrays: Arrays, rank: int, value: Array, magnitude: Array) -> None:
    """Store the rows of a rank's experts at their slots; those that it has no row for are NaN."""
    routing, w = experts.routing_of(p, arrays, rank), experts.weights_of(p, arrays)
    needed, capacity = int(routing.needed), p.capacities[rank]
    x, slots = wide(arrays["x"])[:needed], routing.slots[:needed]
    for target, rows, weight in ((value, x, w), (magnitude, abs(x), abs(w))):
        products = experts.zeros(x, needed, w.shape[2]) + float("nan")
        experts.by_expert(routing, weight, rows[:capacity], products)
        target[slots] = products


def _sums(p: Problem, arrays: Arrays, rank: int, value: Array, magnitude: Array) -> Exact:
    """Return per token the sum of its slots' rows; NaN where an expert does not exist."""
    own = experts.routing_of(p, arrays, rank).own.reshape(-1, p.topk)
    library = library_of(value)
    wrong = (own >= p.experts * p.world).any(1)
    nan = library.where(wrong, float("nan"), 0.0)[:, None]
    shape = (p.rows[rank], p.topk, value.shape[1])
    total, size = value.reshape(shape).sum(1) + nan, magnitude.reshape(shape).sum(1)
    partial = abs(value).reshape(shape).sum(1)
    return Exact(total, size, partial, p.k + p.topk)


OPERATOR = Operator(
    name="matmul_combine",
    label="mm+comb",
    about="multiply the rows of experts, return them to their tokens, and add them up there",
    flow=Flow("scatter", "experts", "combine", "reduce_scatter"),
    schedules=("push_sm",),
    check=experts.check,
    fields=experts.fields,
    result_shapes=_result_shapes,
    operands=experts.operands,
    meaning=_meaning,
    blocks=blocks.scattered,
    reference=_reference,
    pose=experts.pose,
    per_rank=("xs", "ids", "ws"),
    drawn=experts.drawn,
    general=False,
    function=expert_functions.COMBINE,
)
