"""Facts: the static numbers of a problem that a choice depends on. Every rank knows all of them.

A rank does not know the columns (or depth of k) of other ranks. With schedule="auto" it assumes
that they equal its own, so that all ranks make the same choice without a message. These sizes are
rounded, so that uneven chunks of one size give equal facts. If the chunks are on two sides of a
rounding edge, ranks may choose differently, and the call fails as diverged. The number of indices
that a rank looks up is not shared either: each bag is assumed to hold POOLING of them.
"""

from __future__ import annotations

from typing import NamedTuple

from ficco.lowering.one_kernel_gather import is_one_kernel
from ficco.lowering.sending import sends_all
from ficco.operators import registry
from ficco.operators.problem import POOLING, Problem
from ficco.plan.tables import MOST_TABLES

_MANY_ROWS = 512  # beyond, a few rows more or less rarely change which schedule is best


class Facts(NamedTuple):
    """Static numbers of one rank's part.

    Attributes:
        op, world, dtype: those of the problem.
        gathers: whether inputs travel and are multiplied as they arrive; else products travel.
        m, n, k: sizes of the rank's whole GEMM, [m, k] . [k, n]. For an embedding n is the number
            of columns of all its tables, and k the number of lookups per bag.
        piece_bytes: bytes that the rank sends to one peer, on average.
        sent_bytes: bytes that leave the rank; an all-reduce sends everything twice.
        flops: operations of its GEMM; 0 for an embedding.
        item: bytes of an element.
        sums: whether all products are sums over arrivals (along the contraction).
        plain: whether every product is along rows.
        storing: whether one launch that stores at peers can run it. `candidates.few_rows` says up
            to how many rows that may win.
        biased: whether an output has a bias.
        sending: whether one launch that sends rows, or products by rows, can run it.
        tokens: with experts, the tokens of a rank; then m is the average number of its rows.
        weight_bytes: with experts, the bytes of their weights on a rank.
        topk: with experts, the slots of a token.
    """

    op: str
    world: int
    dtype: str
    gathers: bool
    m: int
    n: int
    k: int
    piece_bytes: int
    sent_bytes: int
    flops: float
    item: int
    sums: bool
    plain: bool
    storing: bool
    biased: bool = False
    sending: bool = False
    tokens: int = 0
    weight_bytes: int = 0
    topk: int = 0

    @property
    def flow(self) -> registry.Flow:
        """How the operator's data flows."""
        return registry.get(self.op).flow

    @property
    def intensity(self) -> float:
        """Operations per byte that leaves the rank."""
        return self.flops / max(self.sent_bytes, 1)


def facts_of(problem: Problem) -> Facts:
    """Return the facts of the largest rank; O(world), for all-to-all O(world^2)."""
    p, world, flow = problem, problem.world, problem.flow
    gathers = flow.gathers
    item = p.travelling_itemsize
    n = sum(max(output.columns) for output in p.products)
    k, m, sent_rows = p.k, p.m, max(p.rows) * (world - 1)
    if flow.sums:
        k, width = _rounded(max(p.depths)), n
    elif flow.routes:  # rows of experts on average; tokens travel, or the rows of all slots
        width, m = (p.k if gathers else n), -(-p.routed.slots // world)
        sent_rows = max(p.rows) * (world - 1)
        if not gathers:
            sent_rows = -(-max(p.rows) * p.topk * (world - 1) // world)
    elif flow.pools:
        n = width = n * max(len(tables) for tables in p.tables)
        k = POOLING
    else:
        width = p.k if gathers else n
    if flow.own_columns:
        n = _rounded(n)
    if flow.splits:
        sent_away = [sum(row) - row[rank] for rank, row in enumerate(p.splits)]
        arriving = [sum(row[rank] for row in p.splits) for rank in range(world)]
        received = [rows - p.splits[rank][rank] for rank, rows in enumerate(arriving)]
        m, sent_rows = max(arriving if gathers else p.rows), max(*sent_away, *received)
    flops = 0.0 if flow.pools else 2.0 * m * n * k
    sent = sent_rows * width * item
    piece = sent // max(world - 1, 1)
    axes = {output.axis for output in p.products}
    return Facts(
        p.op, world, p.dtype, gathers, m, n, k, piece, flow.passes * sent, flops, item,
        axes == {"contraction"}, axes == {"rows"}, _storing(p),
        any(output.bias for output in p.outputs), not (flow.pools or flow.routes) and sends_all(p),
        max(p.rows) if flow.routes else 0, p.experts * k * n * item, p.topk,
    )  # fmt: skip


def near(facts: Facts) -> Facts:
    """Return facts with many rows rounded by up to 3%, so that lengths nearby share a choice.

    A choice takes about a millisecond, and a server gets prompts of many different lengths.
    """
    if facts.m <= _MANY_ROWS:
        return facts
    rows = _rounded(facts.m)
    return facts._replace(
        m=rows,
        tokens=facts.tokens * rows // facts.m,
        piece_bytes=facts.piece_bytes * rows // facts.m,
        sent_bytes=facts.sent_bytes * rows // facts.m,
        flops=2.0 * rows * facts.n * facts.k if facts.flops else 0.0,
    )


def _storing(problem: Problem) -> bool:
    if problem.flow.one_kernel == "gather":
        return is_one_kernel(problem)
    if problem.flow.one_kernel == "pool":
        return max(map(len, problem.tables)) <= MOST_TABLES
    one = max(map(len, problem.pairs), default=1) == 1
    return problem.flow.one_kernel == "all_reduce" and one


def _rounded(size: int) -> int:
    """Round a size to a multiple of a 16th of its power of two; small sizes do not change.

    Most sizes are multiples of small powers of two, so rounding edges avoid these.
    """
    unit = 1 << max(0, size.bit_length() - 5)
    return (size + unit * 2 // 3) // unit * unit
