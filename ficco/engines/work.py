"""A compute step as calls of a library on GPUs: equal pieces at equal distances become one call.

What is worked out here once per plan is told to a `DeviceCompute` at every call, with that call's
arrays. Nothing here knows streams or windows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ficco.compute import DeviceCompute, Slots
from ficco.engines.rows import Work
from ficco.plan import Product, RankPlan, Region, Step

__all__ = ["Call", "View", "calls_of"]

View = Callable[[Region], Any]  # the handle of a region in this call
Call = Callable[[DeviceCompute, View], None]


def calls_of(plan: RankPlan, work: Work) -> list[Call]:
    """Return the library calls of a step of a plan, or of a part of one, in order."""
    step = work.step
    reads, writes = work.work.reads, work.work.writes
    if step.kind == "local_copy":
        return [_copy(a, b) for a, b in _joined(reads, writes)]
    if step.kind == "reduce":
        return [_sum(reads, writes[0])]
    if step.kind == "bag":
        return [_bag(plan, reads[3 * i : 3 * i + 3], target) for i, target in enumerate(writes)]
    return [_gemm(step, run) for run in _runs(step, work.work.products)]


def _joined(reads: tuple[Region, ...], writes: tuple[Region, ...]) -> list[tuple[Region, Region]]:
    """Return copies, of which those that lie below one another on both sides are one."""
    found: list[tuple[Region, Region]] = []
    for source, target in sorted(zip(reads, writes, strict=True), key=lambda pair: pair[0][1:3]):
        if not source.area:
            continue
        if found:
            above, there = found[-1]
            if (
                above._replace(row0=above.row1, row1=source.row1) == source
                and there._replace(row0=there.row1, row1=target.row1) == target
            ):
                joined = above._replace(row1=source.row1), there._replace(row1=target.row1)
                found[-1] = joined
                continue
        found.append((source, target))
    return found


def _copy(source: Region, target: Region) -> Call:
    return lambda compute, view: compute.copy(view(source), view(target))


def _bag(plan: RankPlan, reads: tuple[Region, ...], target: Region) -> Call:
    table, indices, bags = reads
    offsets = bags._replace(col0=0, col1=plan.buffer(bags.buffer).cols)  # a bag ends at the next

    def call(compute: DeviceCompute, view: View) -> None:
        starts, first_last = view(offsets)[0], (bags.col0, bags.col1)
        compute.bag(view(table), view(indices)[0], starts, first_last, view(target))

    return call


# ---- sums


def _sum(reads: tuple[Region, ...], target: Region) -> Call:
    """Return one pass over slots of a window and the own part, or a plain sum."""
    bias = reads[-1] if len(reads) > 1 and reads[-1].rows == 1 < target.rows else None
    terms = reads[:-1] if bias is not None else reads
    if len(terms) == 1:
        return _sum_call((), 0, terms[0], 0, bias, target)
    for at, own in enumerate(terms):
        slots = terms[:at] + terms[at + 1 :]
        distance = _distance(slots)
        if slots and distance is not None and own.buffer != slots[0].buffer:
            return _sum_call(slots, distance, own, at, bias, target)
    return lambda compute, view: compute.reduce([view(r) for r in reads], view(target))


def _sum_call(
    slots: tuple[Region, ...], distance: int, own: Region, at: int, bias: Region | None,
    target: Region,
) -> Call:  # fmt: skip
    def call(compute: DeviceCompute, view: View) -> None:
        found = Slots(view(slots[0] if slots else own), len(slots), distance)
        offset = None if bias is None else view(bias)
        compute.sum(found, view(own), at, offset, view(target))

    return call


def _distance(regions: tuple[Region, ...]) -> int | None:
    """Return the rows from one region to the next, if they are alike and equally far apart."""
    if len(regions) < 2:
        return 0
    first = regions[0]
    distance = regions[1].row0 - first.row0
    for one, other in pairwise(regions):
        alike = other._replace(row0=one.row0, row1=one.row1) == one and other.rows == one.rows
        if not alike or other.row0 - one.row0 != distance or distance <= 0:
            return None
    return distance


# ---- GEMMs


def _runs(step: Step, products: tuple[Product, ...]) -> list[tuple[Product, ...]]:
    """Cut products into runs that one strided-batched GEMM can do."""
    runs: list[tuple[Product, ...]] = []
    for product in products:
        longer = (*runs[-1], product) if runs else ()
        if longer and not step.transpose_a and _batches(longer):
            runs[-1] = longer
        else:
            runs.append((product,))
    return runs


def _batches(run: tuple[Product, ...]) -> bool:
    first = run[0]
    alike = all(
        (p.b, p.accumulate, p.add) == (first.b, first.accumulate, first.add) for p in run[1:]
    )
    shared = all(term.rows == 1 for term in first.add)
    if not alike or not shared:
        return False
    distances = _distance(tuple(p.a for p in run)), _distance(tuple(p.c for p in run))
    return None not in distances and all(p.c.area for p in run)


def _gemm(step: Step, run: tuple[Product, ...]) -> Call:
    first, count = run[0], len(run)
    turn_a, turn_b = step.transpose_a, step.transpose_b
    rows_a = run[1].a.row0 - first.a.row0 if count > 1 else 0
    rows_c = run[1].c.row0 - first.c.row0 if count > 1 else 0

    def call(compute: DeviceCompute, view: View) -> None:
        a, b, c = view(first.a), view(first.b), view(first.c)
        b = b.T if turn_b else b
        add = [view(region) for region in first.add]
        if count == 1:
            compute.gemm(a.T if turn_a else a, b, c, first.accumulate, add)
        else:
            compute.gemms(
                Slots(a, count, rows_a), b, Slots(c, count, rows_c), first.accumulate, add
            )

    return call
