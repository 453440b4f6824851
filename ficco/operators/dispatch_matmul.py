"""dispatch_matmul: x_r [T_r, k] and w_r [e, k, n] give the rows of rank r's experts [C_r, n].

The rows of all ranks whose expert is on rank r, by expert, times the weight of their expert. The
first GEMM of a mixture of experts. The gathered x may also be an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ficco.operators import blocks, expert_functions, experts
from ficco.operators.problem import Problem, offsets
from ficco.operators.reference import library_of, wide, zero_of
from ficco.operators.registry import Array, Arrays, Exact, Expected, Flow, Operator
from ficco.operators.symbolic import Source, combined, rows_name


def _result_shapes(problem: Problem, rank: int) -> list[tuple[int, int]]:
    shapes = [(problem.capacities[rank], problem.outputs[0].columns[rank])]
    return shapes + [(problem.m, problem.k)] * (len(problem.outputs) - 1)


def _meaning(problem: Problem, rank: int) -> Iterator[Expected]:
    p, (product, *kept), first = problem, problem.outputs, offsets(problem.rows)
    sources = [s for s in range(p.world) if p.rows[s]]
    parts = [Source((rank, rows_name(product.operand, s)), 0, 0) for s in sources]
    yield Expected("y0", 0, p.capacities[rank], 0, product.columns[rank], combined(parts))
    for s in sources if kept else ():
        yield Expected("y1", first[s], first[s + 1], 0, p.k, Source((s, "x"), -first[s], 0))


def _reference(
    problem: Problem, inputs: Sequence[Arrays], ranks: Sequence[int]
) -> list[list[Exact]]:
    library = library_of(inputs[0]["x"])
    x = library.concatenate([wide(arrays["x"]) for arrays in inputs])
    kept = [Exact(x, abs(x), zero_of(x), 0)] * (len(problem.outputs) - 1)
    return [[_rows(problem, x, inputs[rank], rank), *kept] for rank in ranks]


def _rows(p: Problem, x: Array, arrays: Arrays, rank: int) -> Exact:
    """Return the rows of a rank's experts; those behind the list are zero."""
    routing, w = experts.routing_of(p, arrays, rank), experts.weights_of(p, arrays)
    count = min(int(routing.needed), p.capacities[rank])
    rows = x[routing.slots[:count] // p.topk]
    value = experts.zeros(x, p.capacities[rank], w.shape[2])
    magnitude = experts.zeros(x, p.capacities[rank], w.shape[2])
    experts.by_expert(routing, w, rows, value)
    experts.by_expert(routing, abs(w), abs(rows), magnitude)
    return Exact(value, magnitude, zero_of(value), p.k)


OPERATOR = Operator(
    name="dispatch_matmul",
    label="disp+mm",
    about="send all tokens to all ranks, and multiply on each rank the rows of its experts",
    flow=Flow("gather", "experts", "multiply", "all_gather"),
    schedules=("two_waves",),
    check=experts.check,
    fields=experts.fields,
    result_shapes=_result_shapes,
    operands=experts.operands,
    meaning=_meaning,
    blocks=blocks.gathered,
    reference=_reference,
    pose=experts.pose,
    per_rank=("xs", "ids", "ws"),
    drawn=experts.drawn,
    general=False,
    function=expert_functions.DISPATCH,
)
