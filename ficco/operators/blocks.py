"""Blocks: which rows a rank has for each rank, and where they land there. No steps, no chunks."""

from __future__ import annotations

from typing import NamedTuple

from ficco.problem import Problem, offsets

__all__ = ["Blocks", "Incoming", "Outgoing", "exchanged", "gathered", "scattered"]


class Outgoing(NamedTuple):
    """Rows [begin, begin + rows) of what this rank has or makes, and their first row there."""

    begin: int
    rows: int
    recv: int


class Incoming(NamedTuple):
    """Rows that a peer sends here, and the first row where they land."""

    recv: int
    rows: int


class Blocks(NamedTuple):
    """All blocks of one rank, its own for itself included.

    Attributes:
        outgoing: per destination.
        incoming: per source; entries of `recv` follow one another by source.
        window_rows: rows of the window, equal on all ranks.
    """

    rank: int
    outgoing: tuple[Outgoing, ...]
    incoming: tuple[Incoming, ...]
    window_rows: int

    @property
    def arriving(self) -> int:
        """Rows that come together here."""
        return sum(block.rows for block in self.incoming)

    @property
    def own(self) -> Outgoing:
        """The block that stays."""
        return self.outgoing[self.rank]


def gathered(problem: Problem, rank: int) -> Blocks:
    """Every rank gets all rows of every rank (all_gather_matmul)."""
    first = offsets(problem.rows)
    mine = Outgoing(0, problem.rows[rank], first[rank])
    incoming = tuple(Incoming(first[s], problem.rows[s]) for s in range(problem.world))
    return Blocks(rank, (mine,) * problem.world, incoming, problem.m)


def exchanged(problem: Problem, rank: int) -> Blocks:
    """Every rank has a block of its own for each rank (the all-to-all operators)."""
    splits, world = problem.splits, problem.world
    begin = offsets(splits[rank])
    outgoing = tuple(
        Outgoing(begin[d], splits[rank][d], sum(splits[s][d] for s in range(rank)))
        for d in range(world)
    )
    here = offsets([splits[s][rank] for s in range(world)])
    incoming = tuple(Incoming(here[s], splits[s][rank]) for s in range(world))
    tallest = max(sum(splits[s][d] for s in range(world)) for d in range(world))
    return Blocks(rank, outgoing, incoming, tallest)


def scattered(problem: Problem, rank: int) -> Blocks:
    """Every rank makes all rows; rank d gets its rows from each, in a slot of the window each.

    The slot of source s on rank d is s, or s-1 behind d itself, which needs none.
    """
    world, tallest = problem.world, max(problem.rows)
    first = offsets(problem.rows)
    outgoing = tuple(
        Outgoing(first[d], problem.rows[d], (rank - (rank > d)) * tallest) for d in range(world)
    )
    incoming = tuple(Incoming((s - (s > rank)) * tallest, problem.rows[rank]) for s in range(world))
    return Blocks(rank, outgoing, incoming, (world - 1) * tallest)
