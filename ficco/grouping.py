"""Grouping: which pieces of a step lie so that one call of a library does them all.

Engines on GPUs make their calls by it, and the simulator counts them. Nothing is called here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from ficco.plan import Product, RankPlan, Region, Step

__all__ = [
    "FEWEST_STORED",
    "MOST_STORED",
    "distance_of",
    "ends_of",
    "joined_copies",
    "runs_of",
    "stores_of",
]

FEWEST_STORED = 3  # signals that a kernel stores rather than a stream; as in the native core
MOST_STORED = 128  # by one kernel; likewise


def joined_copies(reads: Sequence[Region], writes: Sequence[Region]) -> list[tuple[Region, Region]]:
    """Return copies, of which those that lie below one another on both sides are one."""
    found: list[tuple[Region, Region]] = []
    for source, target in sorted(zip(reads, writes, strict=True), key=lambda pair: pair[0][1:3]):
        if not source.area:
            continue
        if found:
            above, there = found[-1]
            if _goes_on(above, source) and _goes_on(there, target):
                joined = above._replace(row1=source.row1), there._replace(row1=target.row1)
                found[-1] = joined
                continue
        found.append((source, target))
    return found


def ends_of(plan: RankPlan) -> dict[str, tuple[Step, Step]]:
    """Return gated steps whose one kernel gives the window back: what clears signals, and raises.

    These two stand right behind it in its lane and come after nothing else, and its parts wait for
    the rows that they multiply.
    """
    roles = {buffer.name: buffer.role for buffer in plan.buffers}
    lanes: dict[str, list[Step]] = {}
    for step in plan.steps:
        lanes.setdefault(step.lane, []).append(step)
    found = {}
    for steps in lanes.values():
        for step, clear, leave in zip(steps, steps[1:], steps[2:], strict=False):
            reads = [p.a.buffer for part in step.parts if part.waits for p in part.products]
            if (
                any(roles[name] == "window" for name in reads)
                and (clear.kind, leave.kind) == ("clear", "raise")
                and not (clear.after or leave.after)
            ):
                found[step.id] = clear, leave
    return found


def stores_of(
    plan: RankPlan, within: Collection[str], signal_kind: str = "write"
) -> dict[str, int]:
    """Return the steps whose words kernels store on a GPU, and how many of these begin with one.

    They stand in the lane that computes. What is raised right behind what is cleared is stored by
    the same kernels, unless it comes after something else.

    Args:
        plan: of one rank.
        within: steps that other kernels do.
        signal_kind: "write" or "copy"; with "copy" a kernel stores even one signal of a peer.
    """
    found: dict[str, int] = {}
    computing = {step.lane for step in plan.steps if step.kind in ("gemm", "reduce", "bag")}
    before: list[Step] = []  # that one kernel would store
    for step in plan.steps:
        if step.lane not in computing or step.id in within:
            continue
        joins = [s.kind for s in before] == ["clear"] and step.kind == "raise" and not step.after
        before = [*before, step] if joins else [step] if step.kind in ("clear", "raise") else []
        signals = sum(len(s.signals) for s in before)
        at_peers = any(w.rank != plan.rank for s in before if s.kind == "raise" for w in s.signals)
        if signals >= FEWEST_STORED or (signal_kind == "copy" and at_peers):
            found.update({s.id: 0 for s in before} | {before[0].id: -(-signals // MOST_STORED)})
    return found


def distance_of(regions: Sequence[Region]) -> int | None:
    """Return the rows from one region to the next, if they are alike and equally far apart."""
    if len(regions) < 2:
        return 0
    distances = {_rows_below(one, other) for one, other in pairwise(regions)}
    return distances.pop() if len(distances) == 1 else None


def runs_of(products: Sequence[Product], transpose_a: bool) -> list[tuple[Product, ...]]:
    """Cut products into runs that one strided-batched GEMM can do."""
    if len(products) < 2 or transpose_a:
        return [(product,) for product in products]
    runs = [[products[0]]]
    for last, product in pairwise(products):
        run = runs[-1]
        far = _rows_between(last, product)
        if far is not None and (len(run) == 1 or far == _rows_between(*run[:2])):
            run.append(product)
        else:
            runs.append([product])
    return [tuple(run) for run in runs]


def _rows_between(one: Product, other: Product) -> tuple[int, int] | None:
    """Return how far below one another two products read and write, if they are else alike."""
    if (other.b, other.accumulate, other.add) != (one.b, one.accumulate, one.add):
        return None
    if any(term.rows != 1 for term in one.add) or not (one.c.area and other.c.area):
        return None
    read, written = _rows_below(one.a, other.a), _rows_below(one.c, other.c)
    return None if read is None or written is None else (read, written)


def _goes_on(above: Region, below: Region) -> bool:
    """Whether a region begins where the one above it ends."""
    return above[3] == below[2] and above[:2] == below[:2] and above[4:] == below[4:]


def _rows_below(one: Region, other: Region) -> int | None:
    """Return by how many rows a region lies below another one like it."""
    rank, buffer, row0, row1, col0, col1, copy = one
    rows = other[2] - row0
    if rows > 0 and other == (rank, buffer, row0 + rows, row1 + rows, col0, col1, copy):
        return rows
    return None
