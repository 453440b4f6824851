"""Blocks: the rows that a rank has for each rank, and their first row at the receiver."""

from __future__ import annotations

from typing import NamedTuple

from ficco.operators.problem import Problem, offsets


class Outgoing(NamedTuple):
    """Rows [begin, begin + rows) of this rank's data, and their first row at the receiver."""

    begin: int
    rows: int
    recv: int


class Incoming(NamedTuple):
    """Rows that a peer sends here, and their first row in the receive buffer."""

    recv: int
    rows: int


class Blocks(NamedTuple):
    """All blocks of one rank, including its own for itself.

    Attributes:
        rank: the rank.
        outgoing: per destination.
        incoming: per source.
        window_rows: rows of the window, equal on all ranks.
    """

    rank: int
    outgoing: tuple[Outgoing, ...]
    incoming: tuple[Incoming, ...]
    window_rows: int

    @property
    def arriving(self) -> int:
        """Number of rows for this rank, from all sources."""
        return sum(block.rows for block in self.incoming)

    @property
    def own(self) -> Outgoing:
        """The block that stays on this rank."""
        return self.outgoing[self.rank]


def gathered(problem: Problem, rank: int) -> Blocks:
    """Return the blocks if every rank gets all rows of every rank (all_gather_matmul)."""
    first = offsets(problem.rows)
    own = Outgoing(0, problem.rows[rank], first[rank])
    incoming = tuple(Incoming(first[s], problem.rows[s]) for s in range(problem.world))
    return Blocks(rank, (own,) * problem.world, incoming, problem.m)


def exchanged(problem: Problem, rank: int) -> Blocks:
    """Return the blocks if every rank has a separate block for each rank (all-to-all)."""
    splits, world = problem.splits, problem.world
    begin = offsets(splits[rank])
    outgoing = tuple(
        Outgoing(begin[d], splits[rank][d], sum(splits[s][d] for s in range(rank)))
        for d in range(world)
    )
    recv = offsets([splits[s][rank] for s in range(world)])
    incoming = tuple(Incoming(recv[s], splits[s][rank]) for s in range(world))
    tallest = max(sum(splits[s][d] for s in range(world)) for d in range(world))
    return Blocks(rank, outgoing, incoming, tallest)


def scattered(problem: Problem, rank: int) -> Blocks:
    """Return the blocks if every rank makes all rows, and rank d gets its rows from each rank.

    The window has a slot per source: on rank d, slot s for sources s < d, and s-1 for s > d.
    """
    world, tallest = problem.world, max(problem.rows)
    first = offsets(problem.rows)
    outgoing = tuple(
        Outgoing(first[d], problem.rows[d], (rank - (rank > d)) * tallest) for d in range(world)
    )
    incoming = tuple(Incoming((s - (s > rank)) * tallest, problem.rows[rank]) for s in range(world))
    return Blocks(rank, outgoing, incoming, (world - 1) * tallest)
