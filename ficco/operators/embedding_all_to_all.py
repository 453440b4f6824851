"""embedding_all_to_all: a rank pools its tables for the whole batch; each gets its batch slice.

The result is y_r [b_r, all tables of all ranks side by side].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ficco.core.errors import InputError, shown
from ficco.operators.bag_arrays import pose
from ficco.operators.bag_functions import SUMMED
from ficco.operators.blocks import Blocks, Incoming, Outgoing
from ficco.operators.problem import MODES, POOLING, TABLES, Problem, offsets
from ficco.operators.problem_checks import check_per_rank
from ficco.operators.products import check_one_output, one_output
from ficco.operators.reference import is_tensor, library_of, wide, zero_of
from ficco.operators.registry import Array, Arrays, Exact, Expected, Flow, Operand, Operator
from ficco.operators.symbolic import Source, bags_name


def _check(problem: Problem) -> None:
    p = problem
    check_one_output(p)
    for name, per_rank in (("tables", p.tables), ("lookups", p.lookups)):
        if len(per_rank) != p.world:
            raise InputError(
                f"{name}: {len(per_rank)} entries found, {p.world} are needed, one per rank"
            )
        for rank, sizes in enumerate(per_rank):
            check_per_rank(f"{name}[{rank}]", sizes, len(p.tables[rank]), "tables of that rank")
    if not any(p.tables):
        raise InputError("tables: no rank has any")
    if p.modes and [len(modes) for modes in p.modes] != [len(tables) for tables in p.tables]:
        raise InputError(
            f"modes={shown([list(modes) for modes in p.modes])}: one mode per table is needed, or "
            "no modes at all"
        )
    for modes in p.modes:
        for mode in modes:
            if mode not in MODES:
                raise InputError(f"modes: {shown(mode)} found; one of {', '.join(MODES)} is needed")


def _fields(world: int, m: int, n: int, k: int, rows: Sequence[int]) -> dict[str, Any]:
    return {
        **one_output(world, n),
        "tables": ((k,) * TABLES,) * world,
        "lookups": ((m * POOLING,) * TABLES,) * world,
    }


def _result_shapes(problem: Problem, rank: int) -> list[tuple[int, int]]:
    return [(problem.rows[rank], problem.n * sum(len(tables) for tables in problem.tables))]


def _operands(problem: Problem, rank: int) -> list[Operand]:
    p = problem
    operands: list[Operand] = []
    for i, (rows, mode) in enumerate(zip(p.tables[rank], p.modes_of(rank), strict=True)):
        operands += [
            Operand(table := f"table{i}", "table", rows, p.n, p.dtype),
            Operand(f"indices{i}", "indices", 1, p.lookups[rank][i], p.index_dtype, table),
            Operand(f"offsets{i}", "offsets", 1, p.m, p.index_dtype, table),
        ]
        if mode == "weighted":
            count = p.lookups[rank][i]
            operands.append(Operand(f"weights{i}", "factors", 1, count, "float32", table))
    return operands


def _meaning(problem: Problem, rank: int) -> Iterator[Expected]:
    p, column = problem, 0
    begin = offsets(p.rows)[rank]
    for s in range(p.world):
        for i, mode in enumerate(p.modes_of(s)):
            if p.rows[rank]:
                content = Source((s, bags_name(f"table{i}", mode)), begin, -column)
                yield Expected("y0", 0, p.rows[rank], column, column + p.n, content)
            column += p.n


def _blocks(problem: Problem, rank: int) -> Blocks:
    """Every rank has the whole batch of its tables; rank d gets its rows, next to other tables."""
    first, world = offsets(problem.rows), problem.world
    return Blocks(
        rank,
        tuple(Outgoing(first[d], problem.rows[d], 0) for d in range(world)),
        tuple(Incoming(0, problem.rows[rank]) for _ in range(world)),
        max(problem.rows),
    )


def _reference(
    problem: Problem, inputs: Sequence[Arrays], ranks: Sequence[int]
) -> list[list[Exact]]:
    return [[_pooled(problem, inputs, rank)] for rank in ranks]


def _pooled(problem: Problem, inputs: Sequence[Arrays], rank: int) -> Exact:
    first = offsets(problem.rows)
    begin, end = first[rank], first[rank + 1]
    values, magnitudes, longest = [], [], 1
    for source, arrays in enumerate(inputs):
        for i, mode in enumerate(problem.modes_of(source)):
            table, indices = wide(arrays[f"table{i}"]), arrays[f"indices{i}"].ravel()
            edges = [*arrays[f"offsets{i}"].ravel()[begin : end + 1].tolist(), len(indices)]
            edges = edges[: end - begin + 1]
            weights = wide(arrays[f"weights{i}"]).ravel() if mode == "weighted" else None
            mean = mode == "mean"
            values.append(_bags(table, indices, edges, weights, mean))
            sizes = None if weights is None else abs(weights)
            magnitudes.append(_bags(abs(table), indices, edges, sizes, mean))
            longest = max(longest, *(b - a for a, b in pairwise(edges)), 1)
    library = library_of(values[0])
    value = library.concatenate(values, axis=1)
    magnitude = library.concatenate(magnitudes, axis=1)
    return Exact(value, magnitude, zero_of(value), longest)


def _bags(
    table: Array, indices: Array, edges: Sequence[int], weights: Array | None, mean: bool
) -> Array:
    """Return pooled rows of the table; bag i has the indices from edges[i] to edges[i+1]."""
    library = library_of(table)
    if not is_tensor(table):
        factors = library.ones(len(indices)) if weights is None else weights
        sums = [
            factors[a:b] @ table[indices[a:b]] / (max(b - a, 1) if mean else 1)
            for a, b in pairwise(edges)
        ]
        return library.array(sums).reshape(len(edges) - 1, table.shape[1])
    chosen = indices[edges[0] : edges[-1]]
    if not len(chosen):
        return table.new_zeros((len(edges) - 1, table.shape[1]))
    starts = chosen.new_tensor(edges[:-1]) - edges[0]
    return library.nn.functional.embedding_bag(
        chosen, table, starts, mode="mean" if mean else "sum",
        per_sample_weights=None if weights is None else weights[edges[0] : edges[-1]],
    )  # fmt: skip


OPERATOR = Operator(
    name="embedding_all_to_all",
    label="emb+A2A",
    about="pool the tables of a rank for the whole batch, and give each rank its part of it",
    flow=Flow("scatter", "bags", "move", "all_to_all", one_kernel="pool"),
    schedules=("pool_sm",),
    check=_check,
    fields=_fields,
    result_shapes=_result_shapes,
    operands=_operands,
    meaning=_meaning,
    blocks=_blocks,
    reference=_reference,
    pose=pose,
    function=SUMMED,
    per_rank=("tables", "indices", "offsets"),
)
