"""Facts: the static numbers of a problem that a choice looks at. All are known to every rank.

Under `auto` every rank is taken to hold as many columns (or as deep a part of k) as the rank that
asks, for no rank is told of others'; then all ranks come to the same choice without a message.
"""

from __future__ import annotations

from typing import NamedTuple

from ficco.problem import EXCHANGING, REDUCING, Problem

__all__ = ["COLLECTIVE", "Facts", "facts_of"]

# What torch.distributed does for each operator.
COLLECTIVE = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_reduce": "all_reduce",
    "all_to_all_matmul": "all_to_all",
    "matmul_all_to_all": "all_to_all",
    "embedding_all_to_all": "all_to_all",
}


class Facts(NamedTuple):
    """Static numbers of one rank's part.

    Attributes:
        op, world, dtype: of the problem.
        gathers: transfers come first and are multiplied as they arrive; else products travel.
        m, n, k: the rank's whole GEMM, [m, k] . [k, n]; for an embedding n and k are those of its
            pooling: columns of all its tables, lookups a bag.
        piece_bytes: what it sends to one peer.
        sent_bytes: what leaves it in all; an all-reduce sends everything twice.
        flops: operations of its GEMM; 0 for an embedding.
        item: bytes of an element.
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

    @property
    def intensity(self) -> float:
        """Operations a byte that leaves the rank."""
        return self.flops / max(self.sent_bytes, 1)


def facts_of(problem: Problem) -> Facts:
    """Return the facts of the largest rank; O(world)."""
    p, world, item = problem, problem.world, problem.itemsize
    most = max(p.rows)
    gathers = p.op in ("all_gather_matmul", "all_to_all_matmul")
    n = sum(max(output.columns) for output in p.outputs)
    k, m, flops = p.k, p.m, 0.0
    if p.op in REDUCING:
        k, width = max(p.depths), n
    elif p.op == "embedding_all_to_all":
        tables = max(len(mine) for mine in p.tables)
        n = width = n * tables
        lookups = max((max(mine, default=0) for mine in p.lookups), default=0)
        k = max(1, lookups // max(m, 1))
    else:
        width = p.k if gathers else n
    if p.op in EXCHANGING:
        m = max(sum(row[rank] for row in p.splits) if gathers else p.rows[rank]
                for rank in range(world))  # fmt: skip
        most = max(max(row) for row in p.splits)
    if p.op != "embedding_all_to_all":
        flops = 2.0 * m * n * k
    piece = most * width * item
    passes = 2 if p.op == "matmul_all_reduce" else 1
    return Facts(
        p.op, world, p.dtype, gathers, m, n, k, piece, passes * (world - 1) * piece, flops, item
    )
