"""A gated step as launches: one for every output, over the parts of its rows.

    parts   own rows | rows of a peer's chunk, behind its word | ...      in the plan's order
    launch  c[rows of each part] = a.b, a from the caller's matrix or from the window

What a launch waits for it awaits itself, so the engine enqueues nothing between parts.
"""

from __future__ import annotations

from typing import NamedTuple

from ficco.errors import EngineError, ScheduleError
from ficco.kernels.parts import GatedPart
from ficco.plan import Part, Product, RankPlan, Region, Step, word_place

__all__ = ["Launch", "launches_of"]


class Launch(NamedTuple):
    """One launch of a gated step.

    Attributes:
        parts: its parts, in the plan's order.
        n, k: columns of the product, and depth.
        dtype: of all matrices.
        own: the whole matrix that own parts read, or None.
        window: the whole window buffer that the others read, or None.
        b: the operand; `turned`: it is stored transposed.
        bias: one row, or None.
        c: the whole output.
    """

    parts: tuple[GatedPart, ...]
    n: int
    k: int
    dtype: str
    own: Region | None
    window: Region | None
    b: Region
    turned: bool
    bias: Region | None
    c: Region


def launches_of(plan: RankPlan, step: Step) -> list[Launch]:
    """Return a gated step as launches.

    Raises:
        ScheduleError: parts that no kernel does in one launch.
    """
    if step.kind != "gemm" or step.transpose_a:
        raise _refusal(step, "it takes GEMMs along rows alone")
    found: dict[tuple[Region, str], list[tuple[Part, Product]]] = {}
    for part in step.parts:
        for product in part.products:
            found.setdefault((product.b, product.c.buffer), []).append((part, product))
    return [_launch(plan, step, entries) for entries in found.values()]


def _launch(plan: RankPlan, step: Step, entries: list[tuple[Part, Product]]) -> Launch:
    first = entries[0][1]
    roles = {buffer.name: buffer.role for buffer in plan.buffers}
    parts: list[GatedPart] = []
    sources: dict[str, Region] = {}
    for part, product in entries:
        if part.signals or len(part.waits) > 1 or any(word.copy for word in part.waits):
            raise _refusal(step, "a part of it waits for one word of this call at most")
        if product.accumulate or product.add != first.add:
            raise _refusal(step, "none of its parts adds to what is there")
        source = "window" if roles[product.a.buffer] == "window" else "own"
        known = sources.setdefault(source, product.a)
        if known.buffer != product.a.buffer or product.a.copy:
            raise _refusal(step, "its parts read one matrix and one window")
        word = word_place(part.waits[0]) if part.waits else -1
        parts.append(GatedPart(source, product.a.row0, product.c.row0, product.a.rows, word))
    if len(first.add) > 1 or any(region.rows != 1 for region in first.add):
        raise _refusal(step, "it adds one row at most")
    whole = {name: _whole(plan, region) for name, region in sources.items()}
    return Launch(
        tuple(parts),
        first.c.cols,
        first.a.cols,
        plan.buffer(first.a.buffer).dtype,
        whole.get("own"),
        whole.get("window"),
        first.b,
        step.transpose_b,
        first.add[0] if first.add else None,
        _whole(plan, first.c),
    )


def _whole(plan: RankPlan, region: Region) -> Region:
    """Return all rows and columns of a region's buffer."""
    buffer = plan.buffer(region.buffer)
    if region.cols != buffer.cols:
        raise EngineError(f"{region}: parts of one launch take whole rows of {buffer.cols}")
    return region._replace(row0=0, row1=buffer.rows)


def _refusal(step: Step, why: str) -> ScheduleError:
    return ScheduleError(
        f"step {step.id!r}: compute='gated' as one launch: {why}; the nearest that works is "
        "compute='per_chunk'"
    )
