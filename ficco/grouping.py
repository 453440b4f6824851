"""Grouping: the pieces of a step that one library call or kernel can handle together.

GPU engines make their calls by it, and the simulator counts them. This module calls no library.
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

FEWEST_STORED = 3  # from this many signals on, a kernel stores them, not a stream (native core)
MOST_STORED = 128  # signals that one kernel stores (native core)


def joined_copies(reads: Sequence[Region], writes: Sequence[Region]) -> list[tuple[Region, Region]]:
    """Return (source, target) of each copy; copies that are adjacent on both sides are joined."""
    copies: list[tuple[Region, Region]] = []
    for source, target in sorted(zip(reads, writes, strict=True), key=lambda pair: pair[0][1:3]):
        if not source.area:
            continue
        if copies:
            last_source, last_target = copies[-1]
            if _is_adjacent(last_source, source) and _is_adjacent(last_target, target):
                copies[-1] = (
                    last_source._replace(row1=source.row1),
                    last_target._replace(row1=target.row1),
                )
                continue
        copies.append((source, target))
    return copies


def ends_of(plan: RankPlan) -> dict[str, tuple[Step, Step]]:
    """Return the `clear` and `raise` steps that a gated step's kernel runs to release the window.

    The two steps directly follow the gated step in its lane and have no `after`, and the parts of
    the gated step wait for the rows that they multiply.
    """
    roles = {buffer.name: buffer.role for buffer in plan.buffers}
    lanes: dict[str, list[Step]] = {}
    for step in plan.steps:
        lanes.setdefault(step.lane, []).append(step)
    ends = {}
    for steps in lanes.values():
        for step, clear, leave in zip(steps, steps[1:], steps[2:], strict=False):
            reads = [p.a.buffer for part in step.parts if part.waits for p in part.products]
            if (
                any(roles[name] == "window" for name in reads)
                and (clear.kind, leave.kind) == ("clear", "raise")
                and not (clear.after or leave.after)
            ):
                ends[step.id] = clear, leave
    return ends


def stores_of(
    plan: RankPlan, within: Collection[str], signal_kind: str = "write"
) -> dict[str, int]:
    """Return the steps whose signals kernels store on a GPU, and the kernels that begin at each.

    These steps are in lanes that compute. A `raise` directly after a `clear` is stored by the same
    kernels, unless it has an `after`.

    Args:
        plan: the plan of one rank.
        within: ids of steps that other kernels run.
        signal_kind: "write" or "copy"; with "copy" a kernel stores even one signal of a peer.
    """
    kernels: dict[str, int] = {}
    computing = {step.lane for step in plan.steps if step.kind in ("gemm", "reduce", "bag")}
    before: list[Step] = []  # the steps that one kernel would store
    for step in plan.steps:
        if step.lane not in computing or step.id in within:
            continue
        joins = [s.kind for s in before] == ["clear"] and step.kind == "raise" and not step.after
        before = [*before, step] if joins else [step] if step.kind in ("clear", "raise") else []
        signals = sum(len(s.signals) for s in before)
        at_peers = any(w.rank != plan.rank for s in before if s.kind == "raise" for w in s.signals)
        if signals >= FEWEST_STORED or (signal_kind == "copy" and at_peers):
            kernels.update({s.id: 0 for s in before} | {before[0].id: -(-signals // MOST_STORED)})
    return kernels


def distance_of(regions: Sequence[Region]) -> int | None:
    """Return the row distance between regions, if they are alike and at equal distances."""
    if len(regions) < 2:
        return 0
    distances = {_rows_below(one, other) for one, other in pairwise(regions)}
    return distances.pop() if len(distances) == 1 else None


def runs_of(products: Sequence[Product], transpose_a: bool) -> list[tuple[Product, ...]]:
    """Split products into runs that one strided-batched GEMM can compute."""
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
    """Return the row distances of reads and writes of two products, if otherwise alike."""
    if (other.b, other.accumulate, other.add) != (one.b, one.accumulate, one.add):
        return None
    if any(term.rows != 1 for term in one.add) or not (one.c.area and other.c.area):
        return None
    read, written = _rows_below(one.a, other.a), _rows_below(one.c, other.c)
    return None if read is None or written is None else (read, written)


def _is_adjacent(above: Region, below: Region) -> bool:
    """Return whether a region begins at the end of the one above it."""
    return above[3] == below[2] and above[:2] == below[:2] and above[4:] == below[4:]


def _rows_below(one: Region, other: Region) -> int | None:
    """Return the row distance from one region to a similar one below it, or None."""
    rank, buffer, row0, row1, col0, col1, copy = one
    rows = other[2] - row0
    if rows > 0 and other == (rank, buffer, row0 + rows, row1 + rows, col0, col1, copy):
        return rows
    return None
