"""A compute step as calls of a library on GPUs: pieces that `grouping` puts together are one call.

What is worked out here once per plan is told to a `DeviceCompute` at every call, with that call's
arrays. Nothing here knows streams or windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ficco.compute import DeviceCompute, Slots
from ficco.engines.rows import Work
from ficco.grouping import distance_of, joined_copies, runs_of
from ficco.plan import Product, RankPlan, Region, Step

__all__ = ["Call", "View", "calls_of"]

View = Callable[[Region], Any]  # the handle of a region in this call
Call = Callable[[DeviceCompute, View], None]


def calls_of(plan: RankPlan, work: Work) -> list[Call]:
    """Return the library calls of a step of a plan, or of a part of one, in order."""
    step = work.step
    reads, writes = work.work.reads, work.work.writes
    if step.kind == "local_copy":
        return [_copy(a, b) for a, b in joined_copies(reads, writes)]
    if step.kind == "reduce":
        return [_sum(reads, writes[0])]
    if step.kind == "bag":
        return [_bag(plan, reads[3 * i : 3 * i + 3], target) for i, target in enumerate(writes)]
    return [_gemm(step, run) for run in runs_of(work.work.products, step.transpose_a)]


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
        distance = distance_of(slots)
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


# ---- GEMMs


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
