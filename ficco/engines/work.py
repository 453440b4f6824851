"""A compute step as library calls on GPUs; pieces that `grouping` joins are one call.

The library calls are computed once per plan. Every call runs them on a `DeviceCompute` with its own
arrays. Nothing here depends on streams or windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ficco.compute import DeviceCompute, Slots
from ficco.engines.rows import Work
from ficco.grouping import distance_of, runs_of
from ficco.kernels.plan_reader import OutputNames
from ficco.plan import Product, RankPlan, Region, Step

__all__ = ["Call", "Sum", "View", "calls_of", "sum_of", "whole_product"]

View = Callable[[Region], Any]  # the handle of a region in this call
Call = Callable[[DeviceCompute, View], None]


def calls_of(plan: RankPlan, work: Work) -> list[Call]:
    """Return the library calls of a step or of a part of a step, in order."""
    step = work.step
    reads, writes = work.work.reads, work.work.writes
    if step.kind == "reduce":
        return [_sum(reads, writes[0])]
    if step.kind == "bag":
        return [_bag(plan, reads[3 * i : 3 * i + 3], target) for i, target in enumerate(writes)]
    return [_gemm(step, run) for run in runs_of(work.work.products, step.transpose_a)]


def _bag(plan: RankPlan, reads: tuple[Region, ...], target: Region) -> Call:
    table, indices, bags = reads
    offsets = bags._replace(col0=0, col1=plan.buffer(bags.buffer).cols)  # a bag ends at the next

    def call(compute: DeviceCompute, view: View) -> None:
        starts, first_last = view(offsets)[0], (bags.col0, bags.col1)
        compute.bag(view(table), view(indices)[0], starts, first_last, view(target))

    return call


# ---- sums


class Sum(NamedTuple):
    """A sum over ranks in one pass: slots of a window, the own part among them, and a bias.

    Attributes:
        slots: the first slot, or the own part if there is no slot.
        number: number of slots.
        distance: rows from one slot to the next.
        own: the own part; it is added before slot number `own_at`.
        bias: one row, or None.
        target: receives the sum.
    """

    slots: Region
    number: int
    distance: int
    own: Region
    own_at: int
    bias: Region | None
    target: Region


def sum_of(reads: tuple[Region, ...], target: Region) -> Sum | None:
    """Return a reduction as one pass, or None if it needs more."""
    bias = reads[-1] if len(reads) > 1 and reads[-1].rows == 1 < target.rows else None
    terms = reads[:-1] if bias is not None else reads
    if len(terms) == 1:
        return Sum(terms[0], 0, 0, terms[0], 0, bias, target)
    for at, own in enumerate(terms):
        slots = terms[:at] + terms[at + 1 :]
        distance = distance_of(slots)
        if slots and distance is not None and own.buffer != slots[0].buffer:
            return Sum(slots[0], len(slots), distance, own, at, bias, target)
    return None


def _sum(reads: tuple[Region, ...], target: Region) -> Call:
    total = sum_of(reads, target)
    if total is None:
        return lambda compute, view: compute.reduce([view(r) for r in reads], view(target))

    def call(compute: DeviceCompute, view: View) -> None:
        slots = Slots(view(total.slots), total.number, total.distance)
        bias = None if total.bias is None else view(total.bias)
        compute.sum(slots, view(total.own), total.own_at, bias, view(target))

    return call


# ---- GEMMs


def whole_product(plan: RankPlan, names: OutputNames) -> Call:
    """Return the whole product of x and a weight as one call, without its bias."""
    x, w, y = [
        Region(plan.rank, name, 0, buffer.rows, 0, buffer.cols)
        for name in ("x", names.w, names.y)
        for buffer in (plan.buffer(name),)
    ]

    def call(compute: DeviceCompute, view: View) -> None:
        b = view(w)
        compute.gemm(view(x), b.T if names.turned else b, view(y), False, [])

    return call


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
