"""A gated step as launches: one for every output, over the parts of its rows.

    gathering    own rows | rows of a peer's chunk, behind its word | ...     into the output
    scattering   rows for a peer, which raise a word | ... | own rows         into two buffers

Parts stand in the plan's order. What a launch waits for it awaits itself, and what its parts raise
they raise, so the engine enqueues nothing between them.
"""

from __future__ import annotations

from typing import NamedTuple

from ficco.errors import EngineError, ScheduleError
from ficco.kernels.parts import GatedPart
from ficco.lowering import lower_rank
from ficco.plan import Part, Product, RankPlan, Region, Step, word_place
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["Launch", "check_served", "launches_of"]

_OWN, _WINDOW, _RESULT, _PARTIAL = "own", "window", "c", "partial"
_Entries = list[tuple[Part, Product]]


class Launch(NamedTuple):
    """One launch of a gated step. Regions are whole buffers.

    Attributes:
        parts: its parts, in the plan's order.
        n, k: columns of the product, and depth.
        dtype: of what is multiplied.
        b: the operand; `turned`: it is stored transposed.
        bias: one row, or None.
        c: where the result goes, or whatever the launch makes.
        own: what own parts read, or None.
        window: what the others read, or None.
        partial: where parts go that are pushed, if others go to c; else None.
    """

    parts: tuple[GatedPart, ...]
    n: int
    k: int
    dtype: str
    b: Region
    turned: bool
    bias: Region | None
    c: Region
    own: Region | None
    window: Region | None
    partial: Region | None


def check_served(problem: Problem, schedule: Schedule, engine: str | None) -> None:
    """Refuse a schedule that an engine cannot run.

    Args:
        problem: what is asked.
        schedule: resolved.
        engine: None: nothing runs, and a plan will do.

    Raises:
        ScheduleError: nothing implements it.
    """
    if engine not in ("host", None) and schedule.transport == "collective":
        return  # torch.distributed runs it, without a plan
    plan = lower_rank(problem, schedule, 0)
    for step in plan.steps if engine == "cuda" else ():
        if step.parts:
            launches_of(plan, step)  # tells of what no kernel does


def launches_of(plan: RankPlan, step: Step) -> list[Launch]:
    """Return a gated step as launches.

    Raises:
        ScheduleError: parts that no kernel does in one launch.
    """
    if step.kind != "gemm" or step.transpose_a:
        raise _refusal(step, "there is a kernel for GEMMs along rows alone")
    pushes = any(part.signals for part in step.parts)
    found: dict[tuple[str, str], _Entries] = {}
    for part in step.parts:
        for product in part.products:
            key = (product.b.buffer, "" if pushes else product.c.buffer)
            found.setdefault(key, []).append((part, product))
    return [_launch(plan, step, entries) for entries in found.values()]


def _launch(plan: RankPlan, step: Step, entries: _Entries) -> Launch:
    first = entries[0][1]
    roles = {buffer.name: buffer.role for buffer in plan.buffers}
    kept = [product for part, product in entries if not part.signals]  # results, or all there is
    result = (kept or [first])[0]
    used: dict[str, Region] = {}  # a region of every matrix, by what it is to the launch
    parts = []
    for part, product in entries:
        _check(step, part, product)
        source = _WINDOW if roles[product.a.buffer] == "window" else _OWN
        target = _RESULT if product.c.buffer == result.c.buffer else _PARTIAL
        if product.add != (result.add if target == _RESULT else ()):
            raise _refusal(step, "all rows of a result get the same bias, and what is pushed none")
        for role, region in ((source, product.a), (target, product.c), ("b", product.b)):
            if used.setdefault(role, region).buffer != region.buffer:
                raise _refusal(step, f"it uses {region.buffer!r} beside {used[role].buffer!r}")
        begin, past = _columns(product, step.transpose_b)
        if begin != product.c.col0:
            raise EngineError(f"step {step.id!r}: {product.c} takes columns from {begin} on")
        parts.append(
            GatedPart(
                source,
                product.a.row0,
                product.c.row0,
                product.a.rows,
                word_place(part.waits[0]) if part.waits else -1,
                word_place(part.signals[0]) if part.signals else -1,
                target,
                begin,
                past - begin,
            )
        )
    whole = {role: _whole(plan, region) for role, region in used.items()}
    b = whole["b"]
    return Launch(
        parts=tuple(parts),
        n=b.rows if step.transpose_b else b.cols,
        k=first.a.cols,
        dtype=plan.buffer(first.a.buffer).dtype,
        b=b,
        turned=step.transpose_b,
        bias=_whole(plan, result.add[0]) if result.add else None,
        c=whole[_RESULT],
        own=whole.get(_OWN),
        window=whole.get(_WINDOW),
        partial=whole.get(_PARTIAL),
    )


def _check(step: Step, part: Part, product: Product) -> None:
    """Refuse a part that waits, adds or raises more than a launch can."""
    if len(part.waits) > 1 or len(part.signals) > 1:
        raise _refusal(step, "a part waits for one word, and raises one, at most")
    if any(word.copy for word in (*part.waits, *part.signals)) or product.a.copy or product.c.copy:
        raise _refusal(step, "a launch works on the call's own copy of the window")
    if product.accumulate or len(product.add) > 1 or any(r.rows != 1 for r in product.add):
        raise _refusal(step, "a part is one product, and a bias at most")


def _columns(product: Product, turned: bool) -> tuple[int, int]:
    b = product.b
    return (b.row0, b.row1) if turned else (b.col0, b.col1)


def _whole(plan: RankPlan, region: Region) -> Region:
    buffer = plan.buffer(region.buffer)
    return region._replace(row0=0, row1=buffer.rows, col0=0, col1=buffer.cols)


def _refusal(step: Step, why: str) -> ScheduleError:
    return ScheduleError(
        f"step {step.id!r}: compute='gated' as one launch: {why}; the nearest that works is "
        "compute='per_chunk'"
    )
