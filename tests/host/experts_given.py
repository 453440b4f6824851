"""Mixtures of experts for tests of the host engine: a problem, the inputs of ranks, their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.engine.compute import dtype_of
from ficco.operators import registry, routing
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.operators.routing import Routed

Array = npt.NDArray[Any]


class Given(NamedTuple):
    """A problem and its inputs; `ids` [tokens of all ranks, topk], `lists` the slots per rank."""

    problem: Problem
    arrays: list[dict[str, Array]]
    ids: Array
    lists: list[list[int]]

    def tokens(self, rank: int) -> slice:
        """Return the tokens of a rank among those of all ranks."""
        rows = self.problem.rows
        return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


class Sizes(NamedTuple):
    """Sizes of a mixture of experts."""

    rows: Sequence[int]
    experts: int = 2
    topk: int = 2
    k: int = 5
    n: int = 4
    dtype: str = "float32"
    turned: bool = False


def slots_of(ids: Array, sizes: Sizes, rank: int) -> list[int]:
    """Return the slots whose expert is on a rank, in the order of its rows, slot by slot."""
    first, e = sum(sizes.rows[:rank]), sizes.experts
    keys = []
    for slot, expert in enumerate(ids.ravel().tolist()):
        if rank * e <= expert < (rank + 1) * e:
            token = slot // sizes.topk
            others = not first <= token < first + sizes.rows[rank]
            keys.append((expert, others, slot))
    return [slot for *_, slot in sorted(keys)]


def drawn_ids(rng: np.random.Generator, sizes: Sizes) -> Array:
    """Return random expert numbers: some slots have none, some tokens have an expert twice."""
    ids = rng.integers(-1, sizes.experts * len(sizes.rows), (sum(sizes.rows), sizes.topk))
    if len(ids):
        ids[rng.integers(len(ids))] = ids[0, 0]
    return ids


def given(
    op: str, sizes: Sizes, ids: Array, seed: int = 0, capacities: Sequence[int] | None = None,
    kept: bool = False,
) -> Given:  # fmt: skip
    """Return a problem with random inputs. `capacities`: None: each rank has room for its rows."""
    rng, world = np.random.default_rng(seed), len(sizes.rows)
    lists = [slots_of(ids, sizes, rank) for rank in range(world)]
    room = tuple(max(len(one), 1) for one in lists) if capacities is None else tuple(capacities)
    outputs = [Output((sizes.n,) * world, operand_transposed=sizes.turned)]
    outputs += [Output((sizes.k,) * world, "", "gathered")] * kept
    problem = Problem(
        op, world, tuple(sizes.rows), sizes.k, tuple(outputs), sizes.dtype,
        experts=sizes.experts, topk=sizes.topk, capacities=room,
    )  # fmt: skip
    routed, gathers = Routed(sizes.experts, sizes.topk, tuple(sizes.rows)), _gathers(op)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype_of(sizes.dtype))

    arrays = []
    for rank in range(world):
        height = sizes.rows[rank] if gathers else room[rank]
        shape = (sizes.n, sizes.k) if sizes.turned else (sizes.k, sizes.n)
        arrays.append({
            "x": normal(height, sizes.k),
            "routing": routing.table(ids.ravel(), routed, rank).reshape(1, -1),
            "w": normal(sizes.experts * shape[0], shape[1]),
        })  # fmt: skip
    return Given(problem, arrays, ids, lists)


def _gathers(op: str) -> bool:
    return registry.get(op).flow.gathers


def straight(made: Given, whole: bool = False) -> list[Array]:
    """Return the first output of each rank in float64, reckoned slot by slot, without the oracle.

    whole: the sums of `matmul_combine` of all ranks' tokens in one array.
    """
    p = made.problem
    stacks = []
    for arrays in made.arrays:
        blocks = np.split(arrays["w"].astype(np.float64), p.experts)
        stacks.append([b.T if p.outputs[0].operand_transposed else b for b in blocks])
    wide = [arrays["x"].astype(np.float64) for arrays in made.arrays]
    gathers = _gathers(p.op)
    x = np.concatenate(wide)
    sums, results = np.zeros((p.m, p.n)), []
    for rank, slots in enumerate(made.lists):
        y = np.zeros((p.capacities[rank], p.n))
        for row, slot in enumerate(slots):
            token = slot // p.topk
            w = stacks[rank][int(made.ids.ravel()[slot]) - rank * p.experts]
            if gathers and row < len(y):
                y[row] = x[token] @ w
            elif not gathers:
                lost = row >= p.capacities[rank]
                sums[token] += np.nan if lost else wide[rank][row] @ w
        results.append(y)
    if gathers:
        return results
    return [sums] if whole else [sums[made.tokens(rank)] for rank in range(p.world)]
